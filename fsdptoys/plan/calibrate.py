"""``fsdptoys plan calibrate``: fit a hardware profile's rates to measured runs.

    fsdptoys plan calibrate runs/a runs/b hardware=h100 out=mine.yaml

Each rate is multiplied by a factor so that the logarithms of predicted and measured times of a step
agree in the least-squares sense; where runs leave a factor open, as a single run always does, it
stays as close to 1 as possible. Matmuls and attention share a factor, since runs do not separate
them. A rate without effect on any prediction is left alone, and all factors are bounded. Data,
weights and checkpoints of a run may be gone.

Not covered: memory (no rate decides it), the spread between steps, rates that depend on message
size.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import (
    Hardware,
    Quantity,
    dump_hardware,
    hardware_for,
    list_hardware,
    load_hardware,
)
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.least_squares import minimize, move_factor
from fsdptoys.train.recorded_run import RecordedRun, read_recorded_run
from fsdptoys.utils.tables import print_grid

OPTIONS = ("hardware", "out")

NOISE = 0.01  # Expected relative error of a measured step time
# Expected error of a profile's rate, as the logarithm of a factor
SURPRISE = math.log(2.0)
LEAST_EFFECT = 1e-3
"""Smallest relative change of a prediction, on doubling or halving a rate, for the rate to be
fitted."""
LEAST_EFFICIENCY = 0.02

Predict = Callable[[Config, Hardware, int], Prediction]
"""Predicts a run; it is called often for the same run on hardware of one kind."""


class Case(NamedTuple):
    """A measured run."""

    predict: Callable[[Hardware], float]
    measured_seconds: float
    name: str


@dataclass(frozen=True)
class Parameter:
    """Fields of a profile that share a factor."""

    name: str
    fields: tuple[str, ...]
    least: float = 1 / 30  # Smallest factor
    most: float = 30.0

    def bounds(self, hardware: Hardware) -> tuple[float, float]:
        """Logarithms of the smallest and largest factor that keep every efficiency possible."""
        least = self.least
        most = self.most
        for field in self.fields:
            if field.endswith("_efficiency"):
                value = getattr(hardware, field).value
                least, most = max(least, LEAST_EFFICIENCY / value), min(most, 1 / value)
        return min(0.0, math.log(least)), max(0.0, math.log(most))


PARAMETERS = (
    Parameter("compute", ("matmul_efficiency", "attention_efficiency")),
    Parameter("memory", ("memory_efficiency",)),
    Parameter("host", ("host_operator_seconds", "host_collective_seconds")),
    Parameter("links within a machine", ("intra_node_efficiency",)),
    Parameter("links between machines", ("inter_node_efficiency",)),
    Parameter("transfers", ("transfer_bandwidth",)),
    Parameter("latency of transfers", ("transfer_latency_seconds",), most=100.0),
    Parameter("AdamW on the host", ("cpu_adam_parameters_per_second",)),
)


class FittedValue(NamedTuple):
    """A run's step time before and after calibration."""

    name: str
    measured_seconds: float
    before_seconds: float
    after_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration."""

    hardware: Hardware
    changes: dict[str, tuple[float, float]]  # Field → value before and after
    unknown: tuple[str, ...]  # Names of the parameters without effect on any run
    fitted: tuple[FittedValue, ...]


def calibrate(
    cases: Sequence[Case],
    hardware: Hardware,
    parameters: Sequence[Parameter] = PARAMETERS,
    today: date | None = None,
) -> Calibration:
    """Fit a profile's rates to at least one measured run; ``today`` dates the sources of fitted
    values."""
    assert cases
    names = ", ".join(case.name for case in cases)
    logs = np.log([case.measured_seconds for case in cases])
    limits = np.array([parameter.bounds(hardware) for parameter in parameters]).reshape(
        -1, 2
    )

    def predicted(factors: np.ndarray) -> np.ndarray:
        changed = _scaled(hardware, parameters, factors)
        return np.array([case.predict(changed) for case in cases])

    start = np.zeros(len(parameters))
    before = predicted(start)

    def matters(index: int) -> bool:
        """Whether a factor of 2 or 1/2, within its limits, changes any prediction."""
        moves = [
            move_factor(start, limits, index, jump)
            for jump in (math.log(2), -math.log(2))
        ]
        return any(
            np.max(np.abs(predicted(moved) / before - 1)) > LEAST_EFFECT
            for moved in moves
        )

    relevant = list(filter(matters, range(len(parameters))))

    def residuals(moved: np.ndarray) -> np.ndarray:
        factors = start.copy()
        factors[relevant] = moved
        return np.concatenate(
            [(np.log(predicted(factors)) - logs) / NOISE, moved / SURPRISE]
        )

    factors = start.copy()
    if relevant:
        factors[relevant] = minimize(residuals, limits[relevant])
    source = f"calibrated from {names} on {today or date.today()}"
    result = _scaled(hardware, parameters, factors, source)
    after = predicted(factors)
    changes = {
        field: (getattr(hardware, field).value, getattr(result, field).value)
        for index in relevant
        for field in parameters[index].fields
        if getattr(hardware, field).value != getattr(result, field).value
    }
    unknown = tuple(
        parameter.name
        for index, parameter in enumerate(parameters)
        if index not in relevant
    )
    fitted = tuple(
        FittedValue(case.name, case.measured_seconds, float(old), float(new))
        for case, old, new in zip(cases, before, after, strict=True)
    )
    return Calibration(result, changes, unknown, fitted)


def choose_parameters(names: Sequence[str]) -> tuple[Parameter, ...]:
    """The parameters of these names, in their usual order."""
    return tuple(parameter for parameter in PARAMETERS if parameter.name in names)


def error(fit: FittedValue, seconds: float) -> float:
    """Relative error of a time."""
    return seconds / fit.measured_seconds - 1


def _scaled(
    hardware: Hardware,
    rates: Sequence[Parameter],
    factors: np.ndarray,
    source: str | None = None,
) -> Hardware:
    changes = {}
    for parameter, factor in zip(rates, factors, strict=True):
        if factor == 0:
            continue
        for field in parameter.fields:
            quantity: Quantity = getattr(hardware, field)
            value = float(quantity.value * math.exp(factor))
            if field.endswith("_efficiency"):
                value = min(value, 1.0)
            changes[field] = Quantity(value, quantity.source)
            if source is not None:
                changes[field] = Quantity(
                    float(f"{value:.4g}"), f"{source}; before that {quantity.value:g}"
                )
    backends = hardware.attention_backends
    if "attention_efficiency" in changes:
        ratio = (
            changes["attention_efficiency"].value / hardware.attention_efficiency.value
        )
        backends = {
            name: Quantity(
                min(1.0, share.value * ratio),
                f"{share.source}; times {ratio:.4g}, as attention_efficiency",
            )
            for name, share in backends.items()
        }
    changes["attention_backends"] = backends  # type: ignore[assignment]
    return dataclasses.replace(hardware, **changes)  # type: ignore[arg-type]


def read_run(path: Path) -> tuple[RecordedRun, Config, float]:
    """Read a run directory; a ConfigError if it is not one, or has too few steps for a median.

    Returns:
        The run, its configuration without settings that do not affect step times, and the median
        seconds of its steps with an update after the warm-up.
    """
    run = read_recorded_run(path)
    config = run.config()
    spread = run.results.step_time_seconds
    if spread is None:
        raise ConfigError(
            f"{path} has {len(run.steps)} steps, none after the warm-up of "
            f"{run.results.warmup_steps}; give a longer run"
        )
    return run, config, spread.median


def calibrate_runs(
    paths: Sequence[Path], hardware: Hardware | None, predict: Predict
) -> Calibration:
    """Calibrate a profile, by default that of the runs' device, by runs on one kind of device."""
    runs = [read_run(path) for path in paths]
    first = runs[0][0]
    for run, _, _ in runs[1:]:
        if run.device_name != first.device_name:
            raise ConfigError(
                f"{run.path} ran on {run.device_name} and {first.path} on {first.device_name}; "
                "calibrate one at a time"
            )
    hardware = hardware or _profile_of(first)
    if hardware.device_type != first.device_type:
        raise ConfigError(
            f"hardware={hardware.name} is a {hardware.device_type} device, and {first.path} ran "
            f"on a {first.device_type} device, {first.device_name}; set its profile"
        )
    cases = []
    for run, config, measured in runs:
        config.validate(run.world_size, run.device_type)
        seconds = functools.partial(_step_seconds, predict, config, run.world_size)
        cases.append(Case(seconds, measured, run.path.name))
    return calibrate(cases, hardware)


def _step_seconds(
    predict: Predict, config: Config, world_size: int, hardware: Hardware
) -> float:
    return predict(config, hardware, world_size).time.step_seconds


def calibrate_command(argv: Sequence[str], predict: Predict, console: Console) -> int:
    """Run ``fsdptoys plan calibrate RUN_DIR... [hardware=NAME] [out=FILE]``; return the exit
    status."""
    options = {}
    paths = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and key in OPTIONS:
            options[key] = value
        elif equals and not Path(argument).exists():
            raise ConfigError(
                f"{argument} is not an option of fsdptoys plan calibrate; it has hardware=NAME and "
                "out=FILE"
            )
        else:
            paths.append(Path(argument))
    if not paths:
        raise ConfigError(
            "fsdptoys plan calibrate needs a run; write fsdptoys plan calibrate runs/NAME"
        )
    hardware = load_hardware(options["hardware"]) if "hardware" in options else None
    out = Path(options["out"]) if "out" in options else None
    if out is not None:
        _check_new(out)
    result = calibrate_runs(paths, hardware, predict)
    if out is None:
        out = Path(f"{result.hardware.name}_calibrated.yaml")
        _check_new(out)
    print_calibration(result, console)
    try:
        out.write_text(dump_hardware(result.hardware), encoding="utf-8")
    except OSError as mistake:
        raise ConfigError(
            f"out={out} cannot be written ({mistake.strerror}); name another file"
        ) from mistake
    console.print(
        f"Written to {out}; plan with plan.hardware={out}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _check_new(out: Path) -> None:
    if out.exists() or out.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"out={out} must be a new YAML file; set out={out.stem}_new.yaml"
        )
    if not out.parent.is_dir():
        raise ConfigError(
            f"out={out} is in {out.parent}, which is not a folder; set out={out.name} or create "
            "the folder"
        )


def print_calibration(result: Calibration, console: Console) -> None:
    """Print errors before and after, and the changed rates."""
    rows = [["run", "measured", "before", "", "after", ""]]
    for row in result.fitted:
        cells = [f"{row.measured_seconds:.3f} s"]
        for seconds in (row.before_seconds, row.after_seconds):
            cells += [f"{seconds:.3f} s", f"{error(row, seconds):+.1%}"]
        rows.append([row.name, *cells])
    print_grid(rows, "lrrrrr", console, headed=True, wraps=[0])
    console.print()
    for field, (before, after) in result.changes.items():
        console.print(f"{field}: {before:.4g} is now {after:.4g}", highlight=False)
    if result.unknown:
        console.print(
            f"Not fitted, as no run depends on it: {', '.join(result.unknown)}.",
            highlight=False,
        )


def _profile_of(run: RecordedRun) -> Hardware:
    name = (
        "cpu"
        if run.device_type == "cpu"
        else hardware_for(run.device_name, run.device_type)
    )
    if name is None:
        raise ConfigError(
            f"there is no profile of {run.device_name}, on which {run.path} ran; set hardware= "
            f"to one of {', '.join(list_hardware())}, or to your own YAML file"
        )
    return load_hardware(name)
