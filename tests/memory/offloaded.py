"""Training runs whose optimizer is offloaded in buckets small enough that a tiny model has several a unit."""

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdptoys.config.schema import Config
from fsdptoys.memory import BucketedOptimizer, CPUOffloadExecutor, OffloadSchedule, optimizer_offload
from fsdptoys.train.trainer import Trainer
from scripts.parity import Outcome, hash_parameters

OVERLAPPED = "overlapped"
SMALL_BUCKETS = 2**13
"""Bytes: several buckets a unit, and parameters larger than a bucket."""


def trainer(config: Config, how: str | None, **memory: Any) -> Trainer:
    """A trainer with offload of its optimizer, whose buckets are small.

    Args:
        config: without it.
        how: a schedule of optimizer offload, or the overlapped CPU offload, or None.
        memory: further fields of ``MemoryConfig``.
    """
    if how == OVERLAPPED:
        memory |= {"cpu_offload_executor": CPUOffloadExecutor.overlapped, "cpu_threads": 2}
    elif how is not None:
        memory |= {"optimizer_offload": True, "offload_schedule": OffloadSchedule(how), "offload_bucket_mib": 1}
    before, optimizer_offload.MIB = optimizer_offload.MIB, SMALL_BUCKETS
    made = Trainer(replace(config, memory=replace(config.memory, **memory)))
    optimizer_offload.MIB = before
    assert isinstance(made.optimizer, BucketedOptimizer) == (how is not None)
    return made


def outcome(made: Trainer) -> Outcome:
    """Losses, norms and parameters of a trainer so far."""
    if isinstance(made.optimizer, BucketedOptimizer):
        made.optimizer.flush()
    losses, norms = [step.loss for step in made.history], [step.grad_norm for step in made.history]
    return Outcome(losses=losses, grad_norms=norms, parameters=hash_parameters(made))


def train_all(rows: list[tuple[Config, str | None, dict[str, Any]]]) -> list[Outcome]:
    """Train every row on the ranks that this one belongs to."""
    outcomes = []
    for config, how, memory in rows:
        made = trainer(config, how, **memory)
        made.train()
        outcomes.append(outcome(made))
    return outcomes


def take_steps(made: Trainer, first: int, last: int) -> None:
    """Take the steps numbered from ``first`` to ``last``."""
    for step in range(first, last + 1):
        made._train_step(step, time.perf_counter())
        made.history += made.readings.finish(step)


def interrupted(rows: list[tuple[Config, str | None, str | None]], memory: dict[str, Any]) -> list[Outcome]:
    """Train every row to its middle, save, and resume in another trainer, each with its own offload."""
    outcomes = []
    for config, how_before, how_after in rows:
        middle, steps = config.train.steps // 2, config.train.steps
        first = trainer(config, how_before, **(memory if how_before else {}))
        take_steps(first, 1, middle)
        second = trainer(config, how_after, **(memory if how_after else {}))
        take_steps(second, 1, 1)  # loading must replace everything
        move(first, second)
        second.history = list(first.history)
        take_steps(second, middle + 1, steps)
        outcomes.append(outcome(second))
    return outcomes


def move(source: Trainer, target: Trainer) -> None:
    """Save weights, optimizer, schedule and place in the data of one trainer, and load them into another."""
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.broadcast_object_list(folder)
        state = {
            "model": get_model_state_dict(source.strategy.model),
            "optimizer": get_optimizer_state_dict(source.strategy.model, source.optimizer),
        }
        dcp.save(state, checkpoint_id=folder[0])
        loaded = {
            "model": get_model_state_dict(target.strategy.model),
            "optimizer": get_optimizer_state_dict(target.strategy.model, target.optimizer),
        }
        dcp.load(loaded, checkpoint_id=folder[0])
        set_model_state_dict(target.strategy.model, loaded["model"])
        set_optimizer_state_dict(target.strategy.model, target.optimizer, loaded["optimizer"])
        dist.barrier()
    target.schedule.load_state_dict(source.schedule.state_dict())
    target.batches.load_state_dict(source.batches.state_dict())
