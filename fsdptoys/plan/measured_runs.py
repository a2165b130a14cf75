"""Measured runs, read from their directories, and ``fsdptoys plan calibrate``.

    fsdptoys plan calibrate runs/a runs/b hardware=h100 out=mine.yaml

Sources of data, weights and checkpoints are ignored: they do not affect step times and may be gone.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware, dump_hardware, hardware_for, list_hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils.text import printable

from .calibrate import Calibration, Case, calibrate, error

OPTIONS = ("hardware", "out")

Predictor = Callable[[Config, Hardware, int], Callable[[Hardware], Prediction]]
"""Returns a function that predicts a run on hardware of the same kind; it is called often."""


class MeasuredRun(NamedTuple):
    """Content of a run directory."""

    path: Path
    config: Config  # Not validated; without settings that do not affect step times
    world_size: int
    device_type: str
    device_name: str
    step_seconds: float  # Median after the warm-up, of steps with an update


def read_run(path: Path) -> MeasuredRun:
    """Read a run directory; a ConfigError if it is not one, or has too few steps for a median."""
    run = read_recorded_run(path)
    config, spread = run.config(), run.results.step_time_seconds
    if spread is None:
        raise ConfigError(
            f"{path} has {len(run.steps)} steps, none after the warm-up of {run.results.warmup_steps}; "
            "give a longer run"
        )
    return MeasuredRun(path, config, run.world_size, run.device_type, run.device_name, spread.median)


def calibrate_runs(paths: Sequence[Path], hardware: Hardware | None, predictor: Predictor) -> Calibration:
    """Calibrate a profile, by default that of the runs' device, by runs on one kind of device."""
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
            f"{first.device_type} device, {first.device_name}; set its profile"
        )
    cases = []
    for run in runs:
        run.config.validate(run.world_size, run.device_type)
        predict = predictor(run.config, hardware, run.world_size)
        seconds = functools.partial(lambda predict, hardware: predict(hardware).time.step_seconds, predict)
        cases.append(Case(seconds, run.step_seconds, run.path.name))
    return calibrate(cases, hardware)


def calibrate_command(words: Sequence[str], predictor: Predictor, console: Console) -> int:
    """Run ``fsdptoys plan calibrate RUN_DIR... [hardware=NAME] [out=FILE]``; return the exit status."""
    options, paths = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in OPTIONS:
            options[key] = value
        elif equals and not Path(word).exists():
            raise ConfigError(f"{word} is not an option of fsdptoys plan calibrate; it has hardware=NAME and out=FILE")
        else:
            paths.append(Path(word))
    if not paths:
        raise ConfigError("fsdptoys plan calibrate needs a run; write fsdptoys plan calibrate runs/NAME")
    hardware = load_hardware(options["hardware"]) if "hardware" in options else None
    out = Path(options["out"]) if "out" in options else None
    if out is not None and (out.exists() or out.suffix not in (".yaml", ".yml")):
        raise ConfigError(f"out={out} must be a new YAML file; set out={out.stem}_new.yaml")
    if out is not None and not out.parent.is_dir():
        fix = f"set out={out.name} or create the folder"
        raise ConfigError(f"out={out} is in {out.parent}, which is not a folder; {fix}")
    result = calibrate_runs(paths, hardware, predictor)
    if out is None:
        out = Path(f"{result.hardware.name}_calibrated.yaml")
        if out.exists():
            raise ConfigError(f"{out} exists; delete it or set out={out.stem}_new.yaml")
    print_calibration(result, console)
    try:
        out.write_text(dump_hardware(result.hardware), encoding="utf-8")
    except OSError as mistake:
        raise ConfigError(f"out={out} cannot be written ({mistake.strerror}); name another file") from mistake
    console.print(f"Written to {out}; plan with plan.hardware={out}.", highlight=False, soft_wrap=True)
    return 0


def print_calibration(result: Calibration, console: Console) -> None:
    """Print errors before and after, and the changed rates."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for column in ("measured", "before", "", "after", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.fitted:
        cells = [f"{row.measured_seconds:.3f} s"]
        for seconds in (row.before_seconds, row.after_seconds):
            cells += [f"{seconds:.3f} s", f"{error(row, seconds):+.1%}"]
        table.add_row(Text(printable(row.name, console.file)), *cells)
    console.print(table)
    console.print()
    for field, (before, after) in result.changes.items():
        console.print(f"{field}: {before:.4g} is now {after:.4g}", highlight=False)
    if result.unknown:
        console.print(f"Not fitted, as no run depends on it: {', '.join(result.unknown)}.", highlight=False)


def _profile_of(run: MeasuredRun) -> Hardware:
    name = "cpu" if run.device_type == "cpu" else hardware_for(run.device_name, run.device_type)
    if name is None:
        raise ConfigError(
            f"there is no profile of {run.device_name}, on which {run.path} ran; set hardware= to one of "
            f"{', '.join(list_hardware())}, or to your own YAML file"
        )
    return load_hardware(name)
