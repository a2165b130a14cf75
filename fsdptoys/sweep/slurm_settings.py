"""Settings of a batch queue, typed or derived from a run.

    hydra/launcher=submitit_slurm hydra.launcher.partition=gpu hydra.launcher.timeout_min=60

A job's resources follow from its run: nodes from ``launch.nnodes``, GPUs from
``launch.nproc_per_node``, cores from the number of CPU ranks, time from the sweep's limit. Typed
``hydra.launcher`` options take precedence; contradictions are rejected before anything is
submitted.

Limits: jobs are validated for hardware that this machine may lack, so the device and the number of
ranks must be given. Accelerators other than CUDA need ``hydra.launcher.gres=…``, since their names
differ between clusters.
"""

import functools
import importlib.util
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdptoys.config.compose import CONFIG_MODULE, compose_config
from fsdptoys.config.launch_config import DeviceChoice
from fsdptoys.device import DEVICE_TYPES
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import find_hardware
from fsdptoys.utils.text import one_line, suggestion

from .slurm_queue import SLURM, first_line

LAUNCHER_GROUP = "hydra/launcher"
LAUNCHER_SECTION = "hydra.launcher."

LOCAL = "submitit_local"

UNKNOWN_ENDPOINT = "launch.rdzv_endpoint=chosen-by-the-queue"
"""Placeholder with which a run on several nodes is validated."""

HARMLESS_OPTION = re.compile(
    "account|array_parallelism|comment|constraint|cpus_per_gpu|cpus_per_task|exclude|gpus_per_node|"
    "gpus_per_task|gres|max_num_timeout|mem_gb|mem_per_cpu|mem_per_gpu|name|nodes|partition|qos|"
    "signal_delay_s|stderr_to_stdout|tasks_per_node|timeout_min"
)
"""The plugin's options that request resources and cannot run a command."""

HARMLESS_VALUE = re.compile(r"[\w.:,@%+/=&|*()\[\]'\" -]*")
"""Excludes line breaks, which would add a line to the batch script, and interpolations."""

FIXED_OPTIONS: dict[str, tuple[tuple[int, ...], str]] = {
    "tasks_per_node": (
        (1,),
        "one task on a node starts its launch.nproc_per_node ranks",
    ),
    "max_num_timeout": (
        (0,),
        "a job of a sweep restarts from the beginning and would run out of time again",
    ),
    "submitit_folder": ((), "ids and logs are read from the sweep's own folder"),
}
"""Option → allowed values and the reason."""

SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel")

START_SECONDS = 60
"""Allowance for a job's startup before its launcher, which counts toward the queue's time limit."""

SLURM_SETUP = [
    # Since SLURM 22.05 srun does not inherit it and would bind the task to one core.
    # No ${…}: Hydra would read it as an interpolation.
    '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    # A failed task ends the tasks of the other nodes.
    "export SLURM_KILL_BAD_EXIT=1",
]


@dataclass(frozen=True)
class QueueLauncher:
    """The requested launcher, validated."""

    name: str
    overrides: tuple[str, ...]
    user_options: Mapping[str, Any]
    """Typed options of the plugin → value."""
    options: Mapping[str, Any]
    """All options of the plugin, as composed."""


@dataclass(frozen=True)
class SlurmNeeds:
    """Nodes, ranks and device type of a run."""

    nodes: int
    ranks: int
    """Ranks of each node."""
    device_type: str


def split_launcher_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of the run and those of the launcher."""
    of_launcher = [
        word for word in overrides if re.match(r"\+{0,2}hydra[/.]launcher\b", word)
    ]
    return [word for word in overrides if word not in of_launcher], of_launcher


@functools.cache
def read_launcher(overrides: tuple[str, ...]) -> QueueLauncher:
    """Check the launcher's overrides, and that the launcher can be used from here.

    Raises:
        ConfigError: for the first mistake.
    """
    pairs = [word.lstrip("+").partition("=")[::2] for word in overrides]
    names = [value for key, value in pairs if key == LAUNCHER_GROUP]
    if not names:
        raise ConfigError(
            f"{overrides[0]} is of no use without a launcher; add {LAUNCHER_GROUP}={SLURM}"
        )
    if len(names) > 1:
        launchers = " ".join(f"{LAUNCHER_GROUP}={name}" for name in names)
        raise ConfigError(
            f"{launchers} names {len(names)} launchers, but all jobs go to one; keep one of them"
        )
    (name,) = names
    if name not in (SLURM, LOCAL):
        fix = suggestion(
            name, (SLURM, LOCAL), "leave it out to run the jobs here, one after another"
        )
        raise ConfigError(f"{LAUNCHER_GROUP}={name} must be {SLURM} or {LOCAL}; {fix}")
    # A submodule's spec needs its package
    packages = ("hydra_plugins", "hydra_plugins.hydra_submitit_launcher")
    if not all(map(importlib.util.find_spec, packages)):
        raise ConfigError(
            f"{LAUNCHER_GROUP}={name} needs Hydra's submitit launcher; pip install -e '.[slurm]'"
        )
    missing = [command for command in SLURM_COMMANDS if shutil.which(command) is None]
    if name == SLURM and missing:
        raise ConfigError(
            f"{LAUNCHER_GROUP}={SLURM} needs {missing[0]}, which is not on this machine; submit "
            f"from a login node of the cluster, or leave {LAUNCHER_GROUP} out to run the jobs "
            "here"
        )
    options = _compose_launcher(overrides)
    keys = [
        key.removeprefix(LAUNCHER_SECTION) for key, _ in pairs if key != LAUNCHER_GROUP
    ]
    user_options = {key: options.get(key) for key in keys}
    for key, (allowed, why) in FIXED_OPTIONS.items():
        if key in user_options and user_options[key] not in allowed:
            raise ConfigError(
                f"{LAUNCHER_SECTION}{key}={user_options[key]} cannot be set, since {why}; "
                "leave it out"
            )
    return QueueLauncher(name, overrides, user_options, options)


def refuse_commands(overrides: Sequence[str], folder: Path) -> None:
    """Reject launcher overrides from a folder, perhaps someone else's, that may run commands.

    Raises:
        ConfigError: showing the overrides, so that the user can type them if wanted.
    """
    for word in overrides:
        key, _, value = word.partition("=")
        key = key.lstrip("+")
        if key == LAUNCHER_GROUP and re.fullmatch(r"\w+", value):
            continue
        option = key.removeprefix(LAUNCHER_SECTION)
        if not (HARMLESS_OPTION.fullmatch(option) and HARMLESS_VALUE.fullmatch(value)):
            command = shlex.join(
                ["fsdptoys", "sweep", "--resume", str(folder), *overrides]
            )
            raise ConfigError(
                f"the folder {folder} says {one_line(word, longest=None)}, which may run "
                "commands on the nodes and is not taken from a folder; if it is meant, write "
                f"{one_line(command, longest=None)}"
            )


def launching_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run that decide its devices and ranks."""
    return tuple(
        word
        for word in overrides
        if re.match(r"(launch\.|(parallel|experiment)=)", word)
    )


@functools.cache
def find_needs(overrides: tuple[str, ...], launcher_name: str) -> SlurmNeeds:
    """Return the nodes, ranks and device type of a run, given its :func:`launching_overrides`.

    Raises:
        ConfigError: if these do not decide them.
    """
    for word in overrides:
        if word.startswith("launch.rdzv_endpoint="):
            raise ConfigError(
                f"{word} is for machines that are known before; leave it out, the queue chooses "
                "them"
            )
    settings = compose_config([*overrides, UNKNOWN_ENDPOINT])
    launch = settings.launch
    ranks = (
        1
        if launch.nproc_per_node == -1 and settings.parallel.capabilities.single_process
        else launch.nproc_per_node
    )
    if launcher_name == LOCAL:
        if launch.nnodes > 1:
            raise ConfigError(
                f"launch.nnodes={launch.nnodes} needs other machines, and "
                f"{LAUNCHER_GROUP}={LOCAL} has this one alone; set {LAUNCHER_GROUP}={SLURM}"
            )
        hardware = find_hardware(launch.device)
        return SlurmNeeds(
            1, ranks if ranks > 0 else max(1, hardware.devices), hardware.device_type
        )
    if launch.device is DeviceChoice.auto:
        raise ConfigError(
            f"{LAUNCHER_GROUP}={SLURM} runs jobs on machines that are not looked at before, so "
            f"their devices must be named; add launch.device={' or '.join(DEVICE_TYPES)}"
        )
    if ranks == -1:
        raise ConfigError(
            f"{LAUNCHER_GROUP}={SLURM} runs jobs on machines that are not looked at before, so "
            "the ranks on each must be named; add launch.nproc_per_node=8"
        )
    return SlurmNeeds(launch.nnodes, ranks, launch.device.value)


def plugin_options(
    needs: SlurmNeeds, launcher: QueueLauncher, time_limit_seconds: float | None
) -> dict[str, Any]:
    """Return the plugin's options derived from a run's settings, without typed ones.

    Raises:
        ConfigError: if a typed option contradicts the run's settings.
    """
    user_options = launcher.user_options
    if user_options.get("nodes", needs.nodes) != needs.nodes:
        raise ConfigError(
            f"{LAUNCHER_SECTION}nodes={user_options['nodes']} and launch.nnodes={needs.nodes} "
            f"contradict each other; leave out {LAUNCHER_SECTION}nodes"
        )
    if (
        needs.device_type != "cpu"
        and (user_options.get("gpus_per_node") or needs.ranks) < needs.ranks
    ):
        raise ConfigError(
            f"{LAUNCHER_SECTION}gpus_per_node={user_options['gpus_per_node']} is under "
            f"launch.nproc_per_node={needs.ranks}; leave out {LAUNCHER_SECTION}gpus_per_node"
        )
    options: dict[str, Any] = {"nodes": needs.nodes, "tasks_per_node": 1}
    if needs.device_type == "cuda" and not any(
        user_options.get(key) for key in ("gpus_per_task", "gres")
    ):
        options["gpus_per_node"] = needs.ranks
    if needs.device_type == "cpu":
        options["cpus_per_task"] = needs.ranks
    # The queue's signal precedes its limit by this much, which lets a run save and stop.
    signal_seconds = int(launcher.options.get("signal_delay_s", 30))
    if time_limit_seconds is not None:
        seconds = time_limit_seconds + START_SECONDS + signal_seconds
        needed = math.ceil(seconds / 60)
        if (user_options.get("timeout_min") or needed) * 60 < time_limit_seconds:
            raise ConfigError(
                f"{LAUNCHER_SECTION}timeout_min={user_options['timeout_min']} ends jobs before "
                f"their own limit of {time_limit_seconds:g} s; set "
                f"{LAUNCHER_SECTION}timeout_min={needed}"
            )
        options["timeout_min"] = needed
    if launcher.name == SLURM:
        options["setup"] = [*SLURM_SETUP, *(launcher.options.get("setup") or [])]
        options["additional_parameters"] = {
            # submitit's default, SIGUSR2, kills a run; SIGUSR1 asks it to finish its step.
            "signal": f"USR1@{signal_seconds}",
            **(launcher.options.get("additional_parameters") or {}),
        }
    merged = ("setup", "additional_parameters")
    return {
        key: value
        for key, value in options.items()
        if key in merged or user_options.get(key) is None
    }


def _compose_launcher(overrides: tuple[str, ...]) -> dict[str, Any]:
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            tree = hydra.compose(
                None, list(overrides), return_hydra_config=True
            ).hydra.launcher
    except (HydraException, OmegaConfBaseException) as error:
        listed = [word for word in overrides if not word.startswith(LAUNCHER_GROUP)]
        raise ConfigError(
            f"{' '.join(listed)} cannot be composed ({first_line(error)}); "
            "hydra-submitit-launcher lists its options"
        ) from error
    options = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(options, dict)
    return {str(key): value for key, value in options.items()}
