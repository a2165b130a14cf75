"""Record the collectives of one step of a run (``debug.trace_collectives``)."""

from collections.abc import Callable
from pathlib import Path

from fsdptoys.metrics import COLLECTIVES_FILE
from fsdptoys.utils.atomic_write import write_atomically

from .trainer import Trainer


def trace_collectives(
    trainer: Trainer, run_dir: Path, say: Callable[[str], None]
) -> None:
    """Have a trainer record the collectives that this rank issues in one step.

    Args:
        trainer: before its first step.
        run_dir: gets the file.
        say: gets the table.
    """
    from fsdptoys.profiler.collective_table import render, to_lines
    from fsdptoys.profiler.collectives import Call, CollectiveTrace, traced_step

    config = trainer.config
    world = trainer.world
    step = traced_step(trainer.steps_done + 1, config.train.steps)
    stepper = type(trainer.stepper)
    within = {stepper.clip.__code__: "clip", stepper.step.__code__: "optimizer"}

    def write_table(calls: list[Call]) -> None:
        write_atomically(run_dir / COLLECTIVES_FILE, to_lines(calls, step))
        whose = (
            f"step {step} on rank {world.rank} of {world.world_size}, "
            f"parallel={config.parallel.name}"
        )
        say(render(calls, f"collectives of {whose}"))

    trace = CollectiveTrace(step, trainer.strategy.model, within, write_table)
    trainer.follow_phases(trace.enter)
    trainer.around_step = trace.around
