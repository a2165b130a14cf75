"""Metadata of a run in its checkpoints, and checks of whether a run can resume from it.

Metadata common to all ranks: step, settings, position in the data. Each rank adds the states of its
random number generators (``random_states``), which only the same rank at the same world size can
use.

``FACTS`` declares types and ranges, which are checked on reading: a checkpoint of another version,
or an edited one, is skipped or refused like a damaged one.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdptoys import __version__
from fsdptoys.checkpoint import RUN_FOLDER, Schema, check_same, model_config_of, peek
from fsdptoys.config.declared_options import declared_options
from fsdptoys.config.schema import Config
from fsdptoys.data import BatchStream
from fsdptoys.data.sampler import ChangedDataError
from fsdptoys.errors import ConfigError
from fsdptoys.imports import explain_changed, explain_missing
from fsdptoys.metrics import run_dir_path
from fsdptoys.metrics.resume_log import changed_settings
from fsdptoys.optim import OptimConfig
from fsdptoys.utils.bounds import above, at_least, between, max_length
from fsdptoys.utils.from_tree import LARGEST_INTEGER
from fsdptoys.utils.options import Effect
from fsdptoys.utils.text import one_line, short_text

from .launch_env import launch_folder, restart_count
from .random_states import RandomStates

LARGEST_STEP = 10**15 - 1
"""Limit from the number of digits in the name of a checkpoint's folder."""

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
    tune: dict[str, Any] = field(
        default_factory=lambda: {"name": "full"}, metadata=max_length(1000)
    )
    """Missing in checkpoints of versions without adapters."""


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
class _LossScale:
    scale: float = field(metadata=above(0))
    steps_without_overflow: int = field(metadata=between(0, LARGEST_STEP))


@dataclass
class RunFacts:
    """Types and ranges of the common metadata; ``step`` and ``world_size`` are checked against the
    manifest."""

    config: _Config
    data: _Data
    global_batch: int = field(metadata=at_least(1))
    optimizer_steps: int | None = field(metadata=between(0, LARGEST_STEP))
    skipped_steps: int = field(metadata=between(0, LARGEST_STEP))
    skipped_in_a_row: int = field(metadata=between(0, LARGEST_STEP))
    spikes: _Spikes
    metrics: dict[str, int] = field(metadata=between(0, LARGEST_INTEGER, longest=100))
    loss_scale: _LossScale | None = None
    """None without float16, and in checkpoints of versions before it."""
    callbacks: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata=max_length(LONGEST_WORD)
    )
    """Name → state; missing in checkpoints of versions without callbacks."""
    expected_skips: int = field(default=0, metadata=between(0, LARGEST_STEP))
    """Of ``skipped_steps``, those in the search for the loss scale."""


FACTS = Schema(RunFacts, RandomStates)
"""Metadata that every checkpoint of a run must have."""


ORDERING = ("seq_len", "data_seed")
"""Settings of ``train`` on which samples and their order depend."""
MOST_NAMED = 4
"""Changed settings in a sentence."""


def checkpoint_folder(config: Config, run_dir: Path | None) -> str | None:
    """Folder or URL of a run's checkpoints; None if it depends on a run directory that has no name
    yet."""
    if config.checkpoint.folder is not None:
        return config.checkpoint.folder
    return str(run_dir / RUN_FOLDER) if run_dir is not None else None


def check_resume(config: Config, restarted: bool) -> None:
    """Check the checkpoint from which the run would resume, before any worker starts.

    ConfigError if it is missing, damaged, or belongs to another model or optimizer.
    """
    run_dir = config.metrics.run_dir
    folder = checkpoint_folder(
        config, run_dir_path(run_dir) if run_dir is not None else None
    )
    facts = peek(config.checkpoint, folder, restarted, FACTS)
    if facts is not None:
        check_same_run(config, facts)


def check_restart(config: Config) -> None:
    """Raise a ConfigError for a restart by torchrun in a new run directory, which would lose the
    progress so far.

    Our own launcher remembers the directory; torchrun does not.
    """
    of_torchrun = restart_count() > 0 and launch_folder() is None
    if of_torchrun and config.checkpoint.every and config.checkpoint.folder is None:
        raise ConfigError(
            "metrics.run_dir=null is a new folder at each start, and the ranks were restarted; set "
            "metrics.run_dir=runs/NAME, so that they find their checkpoints"
        )


def check_same_run(config: Config, facts: dict[str, Any]) -> list[str]:
    """Check that model, optimizer, state dtypes and number of steps of a run fit a checkpoint's
    metadata.

    ConfigError if the run cannot resume from it; returns sentences about changes that the user may
    not expect.
    """
    where = f"the checkpoint of step {facts['step']}"
    before = facts["config"]
    if missing := explain_missing(before):
        raise ConfigError(f"{where} cannot be resumed yet: {missing}")
    saved_model = model_config_of(
        before["model"], where, "start a new run in another folder"
    )
    check_same(config.model, saved_model, where, "the config.yaml of its run")
    settings = _settings_of_states(config.to_dict())
    for key, saved in _settings_of_states(before).items():
        own = settings[key]
        if saved != own:
            offloads = key == "memory.offload_state_dtype" and saved != "float32"
            raise ConfigError(
                f"{key}={_word(own)} is not {_word(saved)}, with which {where} was made; set "
                f"{key}={_word(saved)}{' memory.optimizer_offload=true' * offloads} or start a new "
                "run in another folder"
            )
    changed = explain_changed(before)
    notes = [] if changed is None else [changed]
    # Counted from the data, which are not prepared yet; the ranks check again
    if config.train.steps == -1:
        return notes
    if facts["step"] > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps} is behind {where}; set "
            f"train.steps={before['train']['steps']}, or more to continue"
        )
    if before["train"]["steps"] == config.train.steps:
        return notes
    return [
        *notes,
        f"train.steps was {before['train']['steps']} and is {config.train.steps}: the schedule "
        "continues as if it had been so from the start",
    ]


def _settings_of_states(tree: dict[str, Any]) -> dict[str, Any]:
    """Settings on which parameters and optimizer states depend, by key."""
    optim = tree["optim"]
    memory = tree["memory"]
    tune = tree.get("tune", {"name": "full"})
    offloaded = (
        memory["offload_state_dtype"] if memory["optimizer_offload"] else "float32"
    )
    return {
        "optim": optim["name"],
        "tune": tune["name"],
        **{
            f"tune.{key}": tune.get(key) for key in ("rank", "alpha", "targets", "base")
        },
        "memory.offload_state_dtype": offloaded,
        "optim.state_dtype": optim.get("state_dtype") or "float32",
    }


def restore_position(
    batches: BatchStream, state: dict[str, Any], config: Config
) -> None:
    """Continue in the data where a checkpoint's run stopped; ConfigError if its data are others."""
    try:
        batches.load_state_dict(state["data"])
    except ChangedDataError as error:
        changed = _explain_changed_data(
            state["config"], config.to_dict(), state["step"]
        )
        if changed is None:
            raise
        raise ConfigError(changed) from error


def _explain_changed_data(
    before: dict[str, Any], after: dict[str, Any], step: int
) -> str | None:
    """A sentence on the settings of the data that differ between two configurations; None if none
    does."""
    trees = [
        {
            "data": tree.get("data"),
            "train": {key: tree["train"].get(key) for key in ORDERING},
        }
        for tree in (before, after)
    ]
    neutral = {
        key
        for key, option in declared_options().items()
        if option.effect is Effect.none
    }
    changed = {
        key: pair
        for key, pair in changed_settings(*trees).items()
        if key not in neutral
    }
    if "data.name" in changed:  # another kind of data has other settings
        changed = {"data": changed["data.name"]}
    if not changed:
        return None
    pairs = list(changed.items())[:MOST_NAMED]
    differences = ", ".join(
        f"{key}={_word(new)} was {_word(old)}" for key, (old, new) in pairs
    )
    return (
        f"{differences} when the checkpoint of step {step} was made, so the order of the data "
        f"cannot continue; set {' '.join(f'{key}={_word(old)}' for key, (old, _) in pairs)} or "
        "start a new run in another folder"
    )


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return short_text(value)
    return one_line(
        f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
    )


def run_facts(config: Config, world_size: int) -> dict[str, Any]:
    """Metadata shared by all checkpoints of a run: world size, configuration and versions."""
    return {
        "world_size": world_size,
        "config": config.to_dict(),
        "versions": {
            "fsdptoys": __version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    }


def check_states(
    optim: OptimConfig, facts: dict[str, Any], tensors: Collection[str]
) -> None:
    """Raise a ConfigError if a checkpoint of these tensors lacks the states of an optimizer that
    has taken a step."""
    has_updated = facts["step"] > facts["skipped_steps"]
    if not has_updated or not optim.state_widths:
        return
    if not any(name.startswith("optim.") for name in tensors):
        raise ConfigError(
            f"optim={optim.name} has states by its state_widths, but its optimizer "
            "shows none to save; keep them in its attribute state, by parameter"
        )
