"""What a checkpoint says of its run besides tensors, and whether a run may go on from it.

The facts of all ranks are plain numbers and words: which step, which settings, where in the data. Each rank adds the
states of its random number generators (``random_states``), which only the same rank of as many can use.

``FACTS`` says what types and ranges they have. They are checked as they are read, so that a checkpoint of another
version, or one that somebody edited, is passed over or refused like a damaged one.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdptoys import __version__
from fsdptoys.checkpoint import RUN_FOLDER, Schema, check_same, model_config_of, peek
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import run_dir_path
from fsdptoys.utils.bounds import at_least, between, max_length
from fsdptoys.utils.from_tree import LARGEST_INTEGER

from .launch_env import (
    launch_folder,
    restart_count,
)
from .random_states import RandomStates

LARGEST_STEP = 10**15 - 1
"""The name of a checkpoint's folder has no more digits."""

LONGEST_WORD = 1000


@dataclass
class _Optim:
    name: str = field(metadata=max_length(LONGEST_WORD))
    state_dtype: str = field(default="", metadata=max_length(LONGEST_WORD))


@dataclass
class _Memory:
    offload_state_dtype: str = field(metadata=max_length(LONGEST_WORD))
    optimizer_offload: bool


@dataclass
class _Train:
    steps: int = field(metadata=between(1, LARGEST_STEP))


@dataclass
class _Config:
    model: dict[str, Any] = field(metadata=max_length(1000))
    optim: _Optim
    memory: _Memory
    train: _Train


@dataclass
class _Data:
    samples: int = field(metadata=at_least(0))
    fingerprint: str = field(metadata=max_length(LONGEST_WORD))
    order: str | None = field(default=None, metadata=max_length(LONGEST_WORD))


@dataclass
class _Spikes:
    losses: list[float] = field(metadata=max_length(10_000))
    in_a_row: int = field(metadata=between(0, LARGEST_STEP))


@dataclass
class RunFacts:
    """Types and ranges of the facts of all ranks; ``step`` and ``world_size`` are checked against the manifest."""

    config: _Config
    data: _Data
    global_batch: int = field(metadata=at_least(1))
    optimizer_steps: int | None = field(metadata=between(0, LARGEST_STEP))
    skipped_steps: int = field(metadata=between(0, LARGEST_STEP))
    skipped_in_a_row: int = field(metadata=between(0, LARGEST_STEP))
    spikes: _Spikes
    metrics: dict[str, int] = field(metadata=between(0, LARGEST_INTEGER, longest=100))


FACTS = Schema(RunFacts, RandomStates)
"""The facts that every checkpoint of a run must have."""


def checkpoint_folder(config: Config, run_dir: Path | None) -> str | None:
    """Where checkpoints of a run go; None where nothing says so before the run directory has a name."""
    if config.checkpoint.folder is not None:
        return config.checkpoint.folder
    return str(run_dir / RUN_FOLDER) if run_dir is not None else None


def check_resume(config: Config, restarted: bool) -> None:
    """Check what the run would go on from, before any worker starts.

    Args:
        config: of the run.
        restarted: whether torchrun or the launcher has started its workers before.

    Raises:
        ConfigError: where that is missing, damaged, or of another model or optimizer.
    """
    named = config.metrics.run_dir
    folder = checkpoint_folder(config, run_dir_path(named) if named is not None else None)
    facts = peek(config.checkpoint, folder, restarted, FACTS)
    if facts is not None:
        check_same_run(config, facts)


def check_restart(config: Config) -> None:
    """Refuse to start again in a new run directory, as if nothing had been done.

    Our own launcher remembers the directory; torchrun does not.

    Raises:
        ConfigError: if ranks were started again and nothing says where their run is.
    """
    of_torchrun = restart_count() > 0 and launch_folder() is None
    if of_torchrun and config.checkpoint.every and config.checkpoint.folder is None:
        raise ConfigError(
            "metrics.run_dir=null is a new folder at each start, and the ranks were started again; set "
            "metrics.run_dir=runs/NAME, so that they find their checkpoints"
        )


def check_same_run(config: Config, facts: dict[str, Any]) -> list[str]:
    """Check that a checkpoint's tensors mean the same in this run.

    Args:
        config: of this run.
        facts: of the checkpoint.

    Returns:
        What may surprise, a sentence each.

    Raises:
        ConfigError: if they do not.
    """
    where = f"the checkpoint of step {facts['step']}"
    before = facts["config"]
    wanted = model_config_of(before["model"], where, "start a new run in another folder")
    check_same(config.model, wanted, where, "the config.yaml of its run")
    if before["optim"]["name"] != config.optim.name:
        raise ConfigError(
            f"optim={config.optim.name} has other states than optim={before['optim']['name']}, with which {where} was "
            f"made; set optim={before['optim']['name']} or start a new run in another folder"
        )
    formats = _states_format(before["memory"]), _states_format(config.to_dict()["memory"])
    if formats[0] != formats[1]:
        raise ConfigError(
            f"memory.offload_state_dtype={formats[1]} is not {formats[0]}, in which {where} holds the optimizer's "
            f"states; set memory.offload_state_dtype={formats[0]}"
            + (" and memory.optimizer_offload=true" if formats[0] != "float32" else "")
        )
    kept = [each.get("state_dtype", "float32") for each in (before["optim"], config.to_dict()["optim"])]
    if kept[0] != kept[1]:
        raise ConfigError(
            f"optim.state_dtype={kept[1]} is not {kept[0]}, in which {where} holds the optimizer's states; set "
            f"optim.state_dtype={kept[0]}"
        )
    if facts["step"] > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps} is behind {where}; set train.steps={before['train']['steps']}, or more "
            "to go on"
        )
    told = []
    if before["train"]["steps"] != config.train.steps:
        told.append(
            f"train.steps was {before['train']['steps']} and is {config.train.steps}: the schedule goes on as if it "
            "had always been so"
        )
    return told


def _states_format(memory: dict[str, Any]) -> str:
    return str(memory["offload_state_dtype"]) if memory["optimizer_offload"] else "float32"


def run_facts(config: Config, world_size: int) -> dict[str, Any]:
    """What every checkpoint of a run says of it."""
    return {
        "world_size": world_size,
        "config": config.to_dict(),
        "versions": {"fsdptoys": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }
