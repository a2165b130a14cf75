"""Compose and validate each combination of a sweep before anything starts.

A word invalid in every combination is the user's mistake and stops the sweep. Keys that do nothing
in a combination, as ``memory.offload_schedule`` without optimizer offload, are dropped from it if
another combination uses them: all their values leave one baseline. A combination with contradictory
overrides, or one that does not fit this machine or number of ranks, is skipped with the reason.
Combinations with equal fingerprints are the same run; environment variables and machine load are
not part of it.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fsdptoys
from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose, compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.launch.hardware import find_hardware
from fsdptoys.launch.launch import (
    AUTO,
    check_plan_settings,
    choose_experiment,
    names_training,
    ranks_on_this_machine,
)
from fsdptoys.metrics.registry import check_writers
from fsdptoys.metrics.run_environment import checkout_commit

from .axes import Combination
from .slurm_settings import (
    SLURM,
    UNKNOWN_ENDPOINT,
    find_needs,
    launching_overrides,
    plugin_options,
    read_launcher,
)

NO_TIME_LIMIT = "train.max_seconds=null"
"""Added to jobs whose experiment limits the time: they would end at different steps, and so with
other losses."""

WITHOUT_EFFECT = {
    "metrics": ("run_dir", "console"),
    "launch": ("device", "nproc_per_node", "rdzv_endpoint", "rdzv_token_file"),
}
"""Section → keys without effect, or covered by another part of the hash."""


@dataclass(frozen=True)
class JobHardware:
    """Devices and ranks of a job."""

    device_type: str
    device_name: str
    world_size: int
    node_ranks: int
    """Ranks of one node."""


class LocalMachine:
    """This machine."""

    extra_overrides: tuple[str, ...] = ()
    """Words added to those of each job."""

    def find(self, overrides: Sequence[str], settings: Config) -> JobHardware:
        """Return the devices and ranks of a job.

        Args:
            overrides: the job's overrides that decide them.
            settings: composed from these overrides.
        """
        launch = settings.launch
        hardware = find_hardware(launch.device)
        ranks = ranks_on_this_machine(
            launch, hardware, settings.parallel.capabilities.single_process
        )
        return JobHardware(
            hardware.device_type, hardware.name, ranks * launch.nnodes, ranks
        )


class BatchQueue(LocalMachine):
    """Nodes chosen by a batch queue."""

    extra_overrides = (UNKNOWN_ENDPOINT,)

    def __init__(
        self, launcher_overrides: Sequence[str], time_limit_seconds: float | None
    ) -> None:
        self._launcher = read_launcher(tuple(launcher_overrides))
        self._limit = time_limit_seconds

    def find(self, overrides: Sequence[str], settings: Config) -> JobHardware:
        """Return the devices and ranks that a job requests from the queue."""
        needs = find_needs(launching_overrides(overrides), self._launcher.name)
        plugin_options(needs, self._launcher, self._limit)
        if self._launcher.name != SLURM:
            return super().find(overrides, settings)
        user_options = self._launcher.user_options
        constraints = [
            f"{key}={user_options[key]}"
            for key in ("partition", "constraint", "gres")
            if user_options.get(key)
        ]
        return JobHardware(
            needs.device_type,
            " ".join([SLURM, *constraints]),
            needs.nodes * needs.ranks,
            needs.ranks,
        )


@dataclass(frozen=True)
class ValidJob:
    """A combination that can run."""

    combination: Combination
    config: Config
    world_size: int
    fingerprint: str


@dataclass(frozen=True)
class InvalidJob:
    """A combination that cannot run."""

    combination: Combination
    reason: str
    overrides: tuple[str, ...]
    """The composed overrides, including the chosen experiment."""
    by_composition: bool = False
    """Whether composing failed; otherwise validation did."""
    unused_key: str | None = None
    """Key that does nothing in this combination."""


def validate_combinations(
    combinations: Sequence[Combination], where: LocalMachine | None = None
) -> list[ValidJob | InvalidJob]:
    """Compose and validate combinations, in their order, for this machine or ``where``.

    Raises:
        ConfigError: for a word invalid by itself, or if no combination can run.
    """
    hardware: dict[tuple[str, ...], JobHardware] = {}
    validate = functools.partial(
        _validate, where=where or LocalMachine(), hardware=hardware
    )
    validated = _drop_unused(list(map(validate, combinations)), validate)
    _refuse_mistakes(validated)
    refused = [entry for entry in validated if isinstance(entry, InvalidJob)]
    if len(refused) == len(validated):
        first = refused[0].reason
        reasons = len({entry.reason for entry in refused})
        of = (
            f", of which the first is refused for this, and others for {reasons - 1} more reasons"
            * (reasons > 1)
        )
        count = (
            f"none of the {len(refused)} combinations can be run{of}: "
            if len(refused) > 1
            else ""
        )
        raise ConfigError(count + first)
    return validated


def _drop_unused(
    validated: Sequence[ValidJob | InvalidJob],
    validate: Callable[[Combination], ValidJob | InvalidJob],
) -> list[ValidJob | InvalidJob]:
    """Validate again without the keys that do nothing; leave out those that become the run of
    another combination."""
    valid = [entry for entry in validated if isinstance(entry, ValidJob)]
    used = {key for entry in valid for key in entry.combination.keys}
    runs: set[object] = {entry.fingerprint for entry in valid}
    jobs: list[ValidJob | InvalidJob] = []
    for entry in validated:
        shorter = entry
        # A key that a group's file sets is among no overrides, and stays.
        while isinstance(
            shorter, InvalidJob
        ) and shorter.unused_key in used.intersection(shorter.combination.keys):
            shorter = validate(shorter.combination.without(shorter.unused_key))
        run = (
            shorter.fingerprint
            if isinstance(shorter, ValidJob)
            else shorter.combination.overrides
        )
        if shorter is entry or run not in runs:
            jobs.append(shorter)
        runs.add(run)
    return jobs


def _validate(
    combination: Combination,
    where: LocalMachine,
    hardware: dict[tuple[str, ...], JobHardware],
) -> ValidJob | InvalidJob:
    """Compose and validate a combination; ``hardware`` is a cache by overrides."""
    overrides = [*combination.overrides, *where.extra_overrides]
    launching = launching_overrides(combination.overrides)
    by_composition = True
    try:
        if launching not in hardware:
            settings = compose_config([*launching, *where.extra_overrides])
            by_composition = False
            hardware[launching] = where.find(launching, settings)
            by_composition = True
        job = hardware[launching]
        if not names_training(overrides):
            overrides.insert(
                0, f"experiment={choose_experiment(job.device_type, job.world_size)}"
            )
        composition = compose(overrides)
        config = composition.config
        if composition.choices["memory"] == AUTO:
            by_composition = False
            raise ConfigError(
                "memory=auto is chosen for one run on its devices, and a sweep compares settings "
                "that it names; name files, such as memory=checkpointing,lean, or ask fsdptoys "
                "plan search"
            )
        if (
            config.train.max_seconds is not None
            and "train.max_seconds" not in combination.keys
        ):
            combination = Combination(
                (*combination.overrides, NO_TIME_LIMIT), combination.varied
            )
            config = compose_config([*overrides, NO_TIME_LIMIT])
        by_composition = False
        check_plan_settings(config.plan, job.device_type)
        config.validate(job.world_size, job.device_type, job.node_ranks)
        check_writers(config.metrics, os.environ, config.writers)
        number = fingerprint(config, job.world_size, job.device_name)
        return ValidJob(combination, config, job.world_size, number)
    except ConfigError as reason:
        unused = reason.key if isinstance(reason, UnusedKeyError) else None
        return InvalidJob(
            combination, str(reason), tuple(overrides), by_composition, unused
        )


def _refuse_mistakes(validated: Sequence[ValidJob | InvalidJob]) -> None:
    """Reject a word that fails to compose in every combination, and also with the groups alone.

    Raises:
        ConfigError: with the message for that word alone.
    """
    broken: list[InvalidJob] = []
    fine: set[str] = set()
    for entry in validated:
        if isinstance(entry, InvalidJob) and entry.by_composition:
            broken.append(entry)
        else:
            fine.update(entry.combination.overrides)
    choices = list_choices()
    fine_alone = set()
    for entry in broken:
        groups = [word for word in entry.overrides if word.partition("=")[0] in choices]
        for word in entry.combination.overrides:
            key = word.partition("=")[0]
            if word in fine or key.lstrip("+") not in entry.reason:
                continue
            alone = (word,) if key in choices else (*groups, word)
            if alone not in fine_alone:
                compose_config(alone)
                fine_alone.add(alone)


def fingerprint(config: Config, world_size: int, device_name: str) -> str:
    """Return a hexadecimal SHA-256 of everything that decides a run's results and speed.

    Args:
        config: validated, with every ``auto`` replaced.
        world_size: ranks on all nodes.
        device_name: name of the devices.
    """
    tree: dict[str, Any] = config.to_dict()
    for section, keys in WITHOUT_EFFECT.items():
        tree[section] = {
            key: value for key, value in tree[section].items() if key not in keys
        }
    tree["mesh"] = {**tree["mesh"], "fsdp_size": config.mesh.shard_ranks(world_size)}
    content = {
        "config": tree,
        "world_size": world_size,
        "device": device_name,
        "torch": str(torch.__version__),
        "fsdptoys": code_version(),
    }
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, default=str).encode()
    ).hexdigest()


@functools.cache
def code_version() -> str:
    """Return the package's version, the commit of a checkout, and for a modified one a hash of its
    files."""
    package = Path(fsdptoys.__file__).resolve().parent
    commit = checkout_commit(package.parent)
    version = f"{fsdptoys.__version__} {commit or ''}".strip()
    if commit is None or not commit.endswith("-dirty"):
        return version
    sums = hashlib.sha256()
    # ``models`` and ``patches`` are links in a checkout, which ``rglob`` does not follow.
    for folder, _, names in sorted(os.walk(package, followlinks=True)):
        for path in sorted(
            Path(folder, name) for name in names if name.endswith(".py")
        ):
            sums.update(
                path.relative_to(package).as_posix().encode()
                + b"\0"
                + path.read_bytes()
                + b"\0"
            )
    return f"{version} {sums.hexdigest()}"
