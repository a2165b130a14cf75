"""Training runs with an offloaded optimizer; a tiny model has several of its buckets a unit."""

from dataclasses import replace
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.memory import (
    BucketedOptimizer,
    CPUOffloadExecutor,
    OffloadSchedule,
    optimizer_offload,
)
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import Outcome, outcome_of
from tests.harness.run_tables import Pair

OVERLAPPED = "overlapped"
SMALL_BUCKETS = 2**13
"""Bytes: several buckets a unit, and parameters larger than a bucket."""


def build_trainer(config: Config, how: str | None, **memory: Any) -> Trainer:
    """A trainer with offload of its optimizer in small buckets.

    Args:
        config: without it.
        how: a schedule of optimizer offload, or the overlapped CPU offload, or None.
        memory: further fields of ``MemoryConfig``.
    """
    if how == OVERLAPPED:
        memory |= {
            "cpu_offload_executor": CPUOffloadExecutor.overlapped,
            "cpu_threads": 2,
        }
    elif how is not None:
        memory |= {
            "optimizer_offload": True,
            "offload_schedule": OffloadSchedule(how),
            "offload_bucket_mib": 1,
        }
    before, optimizer_offload.MIB = optimizer_offload.MIB, SMALL_BUCKETS
    trainer = Trainer(replace(config, memory=replace(config.memory, **memory)))
    optimizer_offload.MIB = before
    assert isinstance(trainer.optimizer, BucketedOptimizer) == (how is not None)
    return trainer


def outcome(trainer: Trainer) -> Outcome:
    """Take the pending optimizer steps, and return the outcome."""
    if isinstance(trainer.optimizer, BucketedOptimizer):
        trainer.optimizer.flush()
    return outcome_of(trainer)


def train_all(rows: list[tuple[Config, str | None, dict[str, Any]]]) -> list[Outcome]:
    """Train every row on the ranks that this one belongs to."""
    outcomes = []
    for config, how, memory in rows:
        trainer = build_trainer(config, how, **memory)
        trainer.train()
        outcomes.append(outcome(trainer))
    return outcomes


def take_steps(trainer: Trainer, first: int, last: int) -> None:
    """Take the steps numbered from ``first`` to ``last``."""
    for step in range(first, last + 1):
        trainer.train_step(step)
        trainer.history += trainer.readings.finish(step)


def offloaded(ranks: int, config: Config, how: str, **memory: Any) -> Pair:
    """Return a run with offload of its optimizer, and one without."""
    return (ranks, (config, how, memory)), (ranks, (config, None, {}))
