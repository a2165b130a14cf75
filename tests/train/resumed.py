"""Runs with checkpoints, killed and resumed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.schema import Config
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer

KEPT = ("step", "loss", "grad_norm", "learning_rate", "valid_tokens", "skipped", "skipped_steps")


class Killed(BaseException):
    """Stands for a kill of the process."""


def kept(config: Config, folder: Path, every: int = 3, url: str | None = None, **checkpoint: Any) -> Config:
    """The configuration with checkpoints and automatic resume, in a run directory or at a URL."""
    if url is not None:
        checkpoint["folder"] = f"{url}{folder}/elsewhere"
    return dataclasses.replace(
        config,
        checkpoint=CheckpointConfig(every=every, resume="auto", **checkpoint),
        metrics=dataclasses.replace(config.metrics, run_dir=str(folder)),
    )


def run_to_the_end(config: Config, prepare: Callable[[Trainer], None] = lambda trainer: None) -> Trainer:
    trainer = Trainer(config)
    prepare(trainer)
    Run(trainer).run()
    return trainer


def run_until(config: Config, killed_in: int, prepare: Callable[[Trainer], None] = lambda trainer: None) -> None:
    """Take steps and end at the start of step ``killed_in``."""
    trainer = Trainer(config)
    prepare(trainer)
    run = Run(trainer)
    take = trainer.batches.next_step

    def next_step() -> Any:
        if trainer.steps_done + 1 == killed_in:
            run.checkpoints.finish()
            raise Killed
        return take()

    trainer.batches.next_step = next_step  # type: ignore[method-assign]
    try:
        run.run()
    except Killed:
        dist.barrier()
    else:
        raise AssertionError("it came to its end")


def steps_of(folder: Path) -> list[list[Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)[name] for name in KEPT] for line in lines]
