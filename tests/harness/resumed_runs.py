"""Runs with checkpoints: killed, resumed, or with infinite gradients."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import CPUOffloadExecutor, MemoryConfig, OffloadSchedule
from fsdptoys.optim import MuonConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, supported, tiny_model

COMPARED_FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "valid_tokens",
    "skipped",
    "skipped_steps",
)

LAZY = MemoryConfig(optimizer_offload=True, offload_schedule=OffloadSchedule.lazy)
OVERLAPPED = MemoryConfig(
    cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped, cpu_threads=2
)
IN_BACKWARD = {
    "memory": MemoryConfig(optimizer_in_backward=True),
    "max_grad_norm": None,
    "skip_nonfinite": False,
}
MUON = {"optim": MuonConfig(lr=1e-2)}

SHORT = 4
"""Steps of runs with many configurations: every second one is saved, and one is repeated."""

SMALL: dict[str, Any] = {
    "model": dataclasses.replace(tiny_model(), n_layers=2),
    "steps": SHORT,
    "grad_accum": 1,
    "deterministic": False,
}


class Killed(BaseException):
    """Stands for a kill of the process."""


def with_checkpoints(
    config: Config,
    folder: Path,
    every: int = 3,
    url: str | None = None,
    **checkpoint: Any,
) -> Config:
    """The configuration with checkpoints and automatic resume, in a run directory or at a URL."""
    if url is not None:
        checkpoint["folder"] = f"{url}{folder}/elsewhere"
    return dataclasses.replace(
        config,
        checkpoint=CheckpointConfig(every=every, resume="auto", **checkpoint),
        metrics=dataclasses.replace(config.metrics, run_dir=str(folder)),
    )


def run_to_the_end(
    config: Config, prepare: Callable[[Trainer], None] = lambda trainer: None
) -> Trainer:
    trainer = Trainer(config)
    prepare(trainer)
    Run(trainer).run()
    return trainer


def run_until(
    config: Config,
    killed_in: int,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Take steps and end at the start of step ``killed_in``."""
    trainer = Trainer(config)
    prepare(trainer)
    run = Run(trainer)
    take = trainer.data.batches.next_step

    def next_step() -> Any:
        if trainer.steps_done + 1 == killed_in:
            run.checkpoints.finish()
            raise Killed
        return take()

    trainer.data.batches.next_step = next_step  # type: ignore[method-assign]
    try:
        run.run()
    except Killed:
        dist.barrier()
    else:
        raise AssertionError("it came to its end")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(folder: Path) -> list[list[Any]]:
    return [[step[name] for name in COMPARED_FIELDS] for step in metrics_of(folder)]


def refused(*configs: Config) -> list[str]:
    """Messages of runs that do not start."""
    messages = []
    for config in configs:
        with pytest.raises(ConfigError) as caught:
            run_to_the_end(config)
        messages.append(str(caught.value))
    return messages


@dataclasses.dataclass
class Row:
    """A run to interrupt: strategy, ranks, options under ``checkpoint``, and options of
    ``make_config``."""

    parallel: ParallelConfig
    ranks: int = 2
    checkpoint: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_resumed_run(label: str, row: Row, folder: Path) -> None:
    """Check that a run killed in its last step and resumed has the steps and parameters of one
    without checkpoints."""
    if not supported({label: row}):
        pytest.skip("this torch lacks a feature of it")
    config = make_config(row.parallel, row.ranks, **SMALL | row.options)
    checkpoint = {"every": 2, **row.checkpoint}
    killed = with_checkpoints(config, folder / "killed", **checkpoint)
    alone = dataclasses.replace(
        config, data=dataclasses.replace(config.data, workers=0)
    )

    def body() -> tuple[int, dict[str, str], dict[str, str]]:
        # Torchao's optimizers take half a minute to compile
        torch.compiler.set_stance("force_eager")
        uninterrupted = run_to_the_end(
            with_checkpoints(alone, folder / "whole", every=0)
        )
        run_until(killed, SHORT)
        resumed = run_to_the_end(killed)
        return (
            len(resumed.history),
            hash_parameters(uninterrupted),
            hash_parameters(resumed),
        )

    steps = SHORT - (SHORT - 1) // checkpoint["every"] * checkpoint["every"]
    outcomes = run_ranks(row.ranks, body)
    parameters = outcomes[0][1]
    assert outcomes == [(steps, parameters, parameters)] * row.ranks
    uninterrupted = steps_of(folder / "whole")
    assert steps_of(folder / "killed") == uninterrupted
    assert [step[0] for step in uninterrupted] == list(range(1, SHORT + 1))


def poison_gradients(
    trainer: Trainer,
    steps: set[int],
    rank: int,
    before: Callable[[int], None] = lambda step: None,
) -> None:
    """Make a gradient of one rank infinite in some steps; call ``before(step)`` before every
    optimizer step."""
    clip = trainer.stepper.clip

    def clip_poisoned(*args: Any) -> torch.Tensor:
        step = trainer.steps_done + 1
        before(step)
        if step in steps and trainer.world.rank == rank:
            grads = [
                param.grad
                for _, param in trainer.strategy.named_parameters()
                if param.grad is not None
            ]
            next(grad for grad in map(local_tensor, grads) if grad.numel()).view(-1)[
                0
            ] = math.inf
        return clip(*args)

    trainer.stepper.clip = clip_poisoned  # type: ignore[method-assign]
