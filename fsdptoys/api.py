"""The interface for Python: compose a configuration, train, predict and compare, or take parts for
a loop of your own.

    config = fsdptoys.compose("model=llama_debug", "parallel=single", "train.steps=20")
    run = fsdptoys.train(config)
    print(run.losses[-1])

Mistakes are ``ConfigError``s with the sentences of the command line.
"""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from fsdptoys.cli.train import prepare_run
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.config.settings import read_mapping, read_settings
from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import EXIT_RECORD_VARIABLE, read_exit_record
from fsdptoys.launch.hardware import find_hardware, set_allocator
from fsdptoys.launch.launch import check_plan_settings, ranks_on_this_machine
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import RunResult, read_result
from fsdptoys.metrics.run_directory import new_run_dir
from fsdptoys.metrics.step import StepMetrics
from fsdptoys.parallel import ParamInit
from fsdptoys.plan.predict import hardware_of, predict, world_size_of
from fsdptoys.plan.search.switches import node_ranks_of, validate_switches
from fsdptoys.report.compare import RunComparison, compare_runs, open_run
from fsdptoys.train.build import build_world
from fsdptoys.train.distributed import device_of, process_group
from fsdptoys.train.parallelize import ParallelModel
from fsdptoys.train.parallelize import parallelize as _parallelize
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class TrainedRun:
    """What a run has left."""

    run_dir: Path
    result: RunResult
    """Contents of ``result.json``: statistics, environment and settings."""
    steps: list[StepMetrics]
    """Metrics of every step."""

    @property
    def losses(self) -> list[float]:
        """Training loss of every step, in nats per token."""
        return [step.loss for step in self.steps]


def compose(
    *overrides: str,
    config: FilePath | Sequence[FilePath] | Mapping[str, Any] | None = None,
) -> Config:
    """Compose a configuration from files or a mapping, and overrides as on the command line.

    Settings between which nothing is chosen have the defaults of ``fsdptoys train`` on every
    machine. Values are checked; ``train``, ``plan`` and ``parallelize`` check the rest.

    Args:
        overrides: ``GROUP=CHOICE`` and ``KEY=VALUE``; they win over ``config``.
        config: a YAML file, the folder of a run, several of these, or a mapping of the same form.

    Raises:
        ConfigError: for the first mistake, in one sentence.
    """
    if isinstance(config, Mapping):
        settings = read_mapping(config, overrides)
    else:
        files: Sequence[FilePath] = ()
        if isinstance(config, (str, os.PathLike)):
            files = [config]
        elif config is not None:
            files = config
        settings = read_settings([os.fspath(file) for file in files], overrides)
    with settings.name_origin():
        return compose_config(settings.overrides)


def train(config: Config) -> TrainedRun:
    """Train, and return the results.

    One rank runs in this interpreter, as from a notebook. Several are started as ``fsdptoys train``
    does, in processes of their own, whose output is printed here. Under torchrun the call is one of
    its ranks. The configuration is not changed.

    Raises:
        ConfigError: for settings that cannot run here.
        RuntimeError: if processes have failed; the message is that of the first failure.
    """
    config = copy.deepcopy(config)
    under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not under_launcher:
        set_allocator()
    hardware = find_hardware(config.launch.device)
    if under_launcher:
        world_size = int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    else:
        single = config.parallel.capabilities.single_process
        local_ranks = ranks_on_this_machine(config.launch, hardware, single)
        world_size = local_ranks * config.launch.nnodes
        if world_size > 1:
            checked = copy.deepcopy(config)
            checked.validate(world_size, hardware.device_type, local_ranks)
            return _train_elsewhere(config)
    check_plan_settings(config.plan, hardware.device_type)
    config.validate(world_size, hardware.device_type, local_ranks)
    prepare_run(config, world_size, local_ranks)
    with process_group(config):
        trainer = Trainer(config)
        try:
            run = Run(trainer)
            run.run()
        finally:
            trainer.patches.undo()
    return read_run(run.run_dir)


def _train_elsewhere(config: Config) -> TrainedRun:
    """Train in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="fsdptoys-") as folder:
        file = Path(folder) / "settings.yaml"
        record = Path(folder) / "outcome.json"
        if config.metrics.run_dir is None:
            name = f"{config.model.name}-{config.parallel.name}"
            config.metrics.run_dir = str(new_run_dir(name))
        file.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdptoys", "train", "--config", str(file)],
            env=os.environ | {EXIT_RECORD_VARIABLE: str(record)},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
        status = process.wait()
        outcome = read_exit_record(record)
    if status:
        reason = (outcome.reason if outcome is not None else None) or (
            f"fsdptoys train has ended with status {status}"
        )
        raise (ConfigError if status == 2 else RuntimeError)(reason)
    return read_run(Path(config.metrics.run_dir))


def read_run(path: Path) -> TrainedRun:
    """Read the results of a run directory.

    Raises:
        ConfigError: if it holds no run that has ended.
    """
    result = read_result(path)
    if result is None:
        raise ConfigError(f"{path} has no results; name the folder of a run that ended")
    return TrainedRun(path, result, open_run(path).steps)


def plan(config: Config) -> Prediction:
    """Predict memory and time of one rank, on the hardware of ``plan.hardware`` with
    ``plan.world_size`` ranks.

    Raises:
        ConfigError: for settings that cannot run there, or that cannot be predicted.
    """
    config = copy.deepcopy(config)
    hardware = hardware_of(config)
    world_size = world_size_of(config, hardware)
    node_ranks = node_ranks_of(config, hardware, world_size)
    validate_switches(config, world_size, hardware.device_type, node_ranks)
    return predict(config, hardware, world_size)


def compare(
    first: FilePath,
    second: FilePath,
    tolerance: float = 0.0,
) -> RunComparison:
    """Compare two runs step by step, and the settings that differ.

    Args:
        first: folder of a run.
        second: likewise.
        tolerance: relative difference up to which two numbers count as equal.

    Raises:
        ConfigError: if a folder holds no run, or they have no step in common.
    """
    return compare_runs(open_run(Path(first)), open_run(Path(second)), tolerance)


def parallelize(config: Config, param_init: ParamInit | None = None) -> ParallelModel:
    """Build the model of a configuration and spread it over the ranks of the process group, for a
    loop of your own. A collective.

    ``strategy.model`` of the result is the module to call, as ``model(tokens, labels, loss_fn)``
    with a loss of ``build_loss``; ``strategy.trainable_parameters()`` are for the optimizer.

    Args:
        config: as ``compose`` returns it; it is not changed.
        param_init: sets initial values of parameters; None for those of the configuration.

    Raises:
        ConfigError: for settings that these ranks cannot run.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "parallelize needs a process group; call it within fsdptoys.process_group(config), or "
            "after torch.distributed.init_process_group"
        )
    config = copy.deepcopy(config)
    world_size = dist.get_world_size()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = device_of(config)
    config.validate(world_size, device.type, local_ranks)
    return _parallelize(config, build_world(config, device), param_init)
