"""Runs that were measured, read from their directories, and ``fsdptoys plan calibrate`` over them.

    fsdptoys plan calibrate runs/a runs/b hardware=h100 out=mine.yaml

A run directory says what was run (``config.yaml``), on what (``environment.json``) and how long each step took
(``metrics.jsonl``). Where a run's data, weights and checkpoints came from changes no step's time and may be gone, so it
is left out.
"""

import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console
from rich.table import Table

from fsdptoys.checkpoint import CheckpointConfig, model_config_of
from fsdptoys.config import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, RESUMES_FILE
from fsdptoys.metrics.resumes import read_resumes, read_steps, starts
from fsdptoys.metrics.summary import summarize
from fsdptoys.optim import OptimConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.simulator.hardware import Hardware, dump_hardware, hardware_for, list_hardware, load_hardware
from fsdptoys.simulator.prediction import Prediction

from .calibrate import Calibration, Case, calibrate, error

LARGEST_FILE_BYTES = 2**20
OPTIONS = ("hardware", "out")

Predictor = Callable[[Config, Hardware, int], Callable[[Hardware], Prediction]]
"""From a run to a function that predicts it on hardware of the same kind, which will be called often."""

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory says."""

    path: Path
    config: Config
    """Not validated; without what decides no step's time."""
    world_size: int
    device_type: str
    device_name: str
    step_seconds: float
    """Median after the warm-up, of steps that made an update."""


def read_run(path: Path) -> MeasuredRun:
    """Read a run directory.

    Raises:
        ConfigError: if it is none, or was too short for a median.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no run directory; give one that fsdptoys train has written, as runs/NAME")
    environment = _read_tree(path / ENVIRONMENT_FILE)
    try:
        world_size, device = int(environment["world_size"]), environment["device"]
        device_type, device_name = str(device["type"]), str(device["name"])
    except (KeyError, TypeError, ValueError) as mistake:
        raise ConfigError(f"{path / ENVIRONMENT_FILE} does not say what the run ran on; leave {path} out") from mistake
    config = read_config(_read_tree(path / CONFIG_FILE), str(path / CONFIG_FILE))
    steps, _ = read_steps(path / METRICS_FILE)
    warmup = config.metrics.warmup_steps
    spread = summarize(steps, warmup, starts(read_resumes(path / RESUMES_FILE))).step_time_seconds
    if spread is None:
        raise ConfigError(
            f"{path} has {len(steps)} steps, and none after the {warmup} of the warm-up; give a run of more steps"
        )
    return MeasuredRun(path, config, world_size, device_type, device_name, spread.median)


def read_config(tree: dict[str, Any], where: str) -> Config:
    """The configuration that a run wrote, as far as it decides how long a step takes.

    Keys that are missing have been added since, and get what they stand at when nothing is said.

    Args:
        tree: of its ``config.yaml``.
        where: the file, for sentences.

    Raises:
        ConfigError: for a key that nothing here reads, and for a value that cannot be.
    """
    kinds = typing.get_type_hints(Config)
    sections: dict[str, Any] = {
        "model": dataclasses.replace(model_config_of(tree.get("model"), where, "leave the run out"), init_from=None),
        "parallel": _build(_kind(ParallelConfig, tree, "parallel", where), tree["parallel"], where, "parallel"),
        "optim": _build(_kind(OptimConfig, tree, "optim", where), tree["optim"], where, "optim"),
        "data": SyntheticConfig(),
        "checkpoint": CheckpointConfig(),
        "patches": tree.get("patches", "auto"),
    }
    for name, kind in kinds.items():
        if name not in sections:
            values = tree.get(name, {})
            if not isinstance(values, dict):
                raise ConfigError(f"{where} says {name}={values}, which must be a mapping; correct it")
            sections[name] = _build(kind, values, where, name)
    config = Config(**sections)
    # What this machine may not have, and the run is not asked for again.
    config.train.eval_every = 0
    config.memory.cpu_threads = None
    config.launch.max_restarts = 0
    config.profile.enabled = False
    return config


def calibrate_runs(paths: Sequence[Path], hardware: Hardware | None, predictor: Predictor) -> Calibration:
    """Calibrate a profile by runs.

    Args:
        paths: run directories, all of one kind of device.
        hardware: where to start; None for the profile of that device.
        predictor: traces a run once.

    Raises:
        ConfigError: if a directory is none of a run, or they are of different devices.
    """
    runs = [read_run(path) for path in paths]
    first = runs[0]
    for run in runs[1:]:
        if run.device_name != first.device_name:
            raise ConfigError(
                f"{run.path} ran on {run.device_name} and {first.path} on {first.device_name}; calibrate one at a time"
            )
    hardware = hardware or _profile_of(first)
    if hardware.device_type != first.device_type:
        raise ConfigError(
            f"hardware={hardware.name} is a {hardware.device_type} device, and {first.path} ran on a "
            f"{first.device_type} device, {first.device_name}; name its profile"
        )
    cases = []
    for run in runs:
        run.config.validate(run.world_size, run.device_type)
        predict = predictor(run.config, hardware, run.world_size)
        cases.append(Case(_step_seconds(predict), run.step_seconds, run.path.name))
    return calibrate(cases, hardware)


def calibrate_command(words: Sequence[str], predictor: Predictor, console: Console) -> int:
    """``fsdptoys plan calibrate RUN_DIR... [hardware=NAME] [out=FILE]``.

    Args:
        words: after the command.
        predictor: see ``calibrate_runs``.
        console: where the table goes.

    Returns:
        Exit status.

    Raises:
        ConfigError: for the first mistake.
    """
    options = {}
    paths = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in OPTIONS:
            options[key] = value
        elif equals and not Path(word).exists():
            raise ConfigError(f"{word} is no option of fsdptoys plan calibrate; there are hardware=NAME and out=FILE")
        else:
            paths.append(Path(word))
    if not paths:
        raise ConfigError("fsdptoys plan calibrate names no run; write fsdptoys plan calibrate runs/NAME")
    hardware = load_hardware(options["hardware"]) if "hardware" in options else None
    out = Path(options["out"]) if "out" in options else None
    if out is not None and (out.exists() or out.suffix not in (".yaml", ".yml")):
        raise ConfigError(f"out={out} must be a YAML file that is not there yet; set out={out.stem}_new.yaml")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out={out} lies in {out.parent}, which is no folder; set out={out.name} or make the folder")
    result = calibrate_runs(paths, hardware, predictor)
    if out is None:
        out = Path(f"{result.hardware.name}_calibrated.yaml")
        if out.exists():
            raise ConfigError(f"{out} is there already; delete it or set out={out.stem}_new.yaml")
    print_calibration(result, console)
    try:
        out.write_text(dump_hardware(result.hardware), encoding="utf-8")
    except OSError as mistake:
        raise ConfigError(f"out={out} cannot be written ({mistake.strerror}); name another file") from mistake
    console.print(f"Written to {out}; plan with plan.hardware={out}.", highlight=False, soft_wrap=True)
    return 0


def print_calibration(result: Calibration, console: Console) -> None:
    """Print errors before and after, and what was moved."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for column in ("measured", "before", "", "after", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.outcomes:
        cells = [f"{row.measured_seconds:.3f} s"]
        for seconds in (row.before_seconds, row.after_seconds):
            cells += [f"{seconds:.3f} s", f"{error(row, seconds):+.1%}"]
        table.add_row(row.name, *cells)
    console.print(table)
    console.print()
    for field, (before, after) in result.changes.items():
        console.print(f"{field}: {before:.4g} is now {after:.4g}", highlight=False)
    if result.unknown:
        console.print(f"Left alone, since no run depends on it: {', '.join(result.unknown)}.", highlight=False)


def _step_seconds(predict: Callable[[Hardware], Prediction]) -> Callable[[Hardware], float]:
    return lambda hardware: predict(hardware).time.step_seconds


def _profile_of(run: MeasuredRun) -> Hardware:
    name = "cpu" if run.device_type == "cpu" else hardware_for(run.device_name, run.device_type)
    if name is None:
        raise ConfigError(
            f"there is no profile of {run.device_name}, on which {run.path} ran; set hardware= to one of "
            f"{', '.join(list_hardware())}, or to a YAML file of your own"
        )
    return load_hardware(name)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_FILE_BYTES + 1)
        if len(text) > LARGEST_FILE_BYTES:
            raise ValueError(f"it is longer than {LARGEST_FILE_BYTES} bytes")
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as mistake:
        raise ConfigError(
            f"{path} cannot be read ({mistake.strerror or mistake}); give a directory that fsdptoys train has written"
        ) from mistake
    except (ValueError, RecursionError, yaml.YAMLError) as mistake:
        reason = " ".join(str(mistake).split())
        raise ConfigError(f"{path} cannot be read ({reason}); use the file that the run wrote") from mistake
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; use the file that the run wrote")
    return tree


def _kind(base: type, tree: dict[str, Any], section: str, where: str) -> type:
    """The class that a section names."""
    values = tree.get(section)
    name = values.get("name") if isinstance(values, dict) else None
    kinds = {getattr(kind, "name", None): kind for kind in _subclasses(base)}
    if name is None or name not in kinds:
        raise ConfigError(f"{where} says {section}.name={name}, which nothing here knows; leave the run out")
    return kinds[name]


def _subclasses(base: type) -> Iterable[type]:
    children: list[type] = base.__subclasses__()
    for kind in children:
        yield kind
        yield from _subclasses(kind)


def _build(kind: type[T], values: Mapping[str, Any], where: str, key: str) -> T:
    """A dataclass out of plain values; ``name`` has said which."""
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    built = {}
    for name, value in values.items():
        if name == "name" and name not in fields:
            continue
        if name not in fields:
            raise ConfigError(f"{where} says {key}.{name}={value}, which nothing here reads; remove it")
        built[name] = _typed(hints[name], value, where, f"{key}.{name}")
    try:
        return kind(**built)
    except TypeError as mistake:
        raise ConfigError(f"{where} lacks a setting of {key} ({mistake}); leave the run out") from mistake


def _typed(annotation: Any, value: Any, where: str, key: str) -> Any:
    kinds = [kind for kind in (typing.get_args(annotation) or (annotation,)) if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, Enum):
            try:
                return kind(value)
            except ValueError:
                continue
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return _build(kind, value, where, key)
    enums = [kind for kind in kinds if issubclass(kind, Enum)]
    if value is not None and enums:
        choices = " | ".join(str(choice.value) for choice in enums[0])
        raise ConfigError(f"{where} says {key}={value}, which must be {choices}; correct it")
    return float(value) if kinds == [float] and type(value) is int else value
