"""Columns of a step's numbers, for the plain and the live console."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fsdptoys.device import GIB
from fsdptoys.utils.text import fitting_unit

from .step import StepMetrics


@dataclass(frozen=True)
class ConsoleColumn:
    """Format of one number of a step on both consoles."""

    heading: tuple[str, str]
    """Two short lines above the column of the live table; ``{unit}`` takes the unit out of the
    values."""
    label: str
    """Text before the value in a plain line; ``unit`` follows the value."""
    unit: str
    width: int
    """Characters in the live table."""
    importance: int
    """A narrow terminal omits the columns of lowest importance."""
    render: Callable[[StepMetrics], str | None]
    """Text of the value; None if the step does not have it, which depends on device and model."""


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def _flops(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _stall(metrics: StepMetrics) -> str | None:
    wait = metrics.data_wait_seconds
    return None if wait is None else f"{wait / metrics.step_time_seconds:.1%}"


def _load(metrics: StepMetrics) -> str | None:
    load = metrics.routing.max_load if metrics.routing else None
    return None if load is None else f"{load:.1f}x" if load < 10 else f"{load:.0f}x"


def _power(scale: float | None) -> str | None:
    """A power of two in short, another number as it is."""
    if scale is None:
        return None
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"


def _sizes(*gib: float | None) -> str:
    """Sizes in one unit, which fits the largest."""
    unit, size = fitting_unit(GIB * max((value for value in gib if value is not None), default=0.0))
    return (
        "/".join("?" if value is None else f"{value * GIB / size:.4g}" for value in gib)
        + f" {unit}"
    )


def _device_memory(metrics: StepMetrics) -> str | None:
    allocated, reserved = metrics.memory_allocated_gib, metrics.memory_reserved_gib
    return None if reserved is None else _sizes(allocated, metrics.memory_peak_gib, reserved)


def _counted_memory(metrics: StepMetrics) -> str | None:
    allocated, reserved = metrics.memory_allocated_gib, metrics.memory_reserved_gib
    return (
        None
        if allocated is None or reserved is not None
        else _sizes(allocated, metrics.memory_peak_gib)
    )


def _resident_set(metrics: StepMetrics) -> str | None:
    return _sizes(metrics.resident_set_gib) if metrics.memory_reserved_gib is None else None


COLUMNS = (
    ConsoleColumn(("", "loss"), "loss", "", 7, 10, lambda m: f"{m.loss:.4f}"),
    ConsoleColumn(("grad", "norm"), "grad norm", "", 7, 8, lambda m: f"{m.grad_norm:.4g}"),
    ConsoleColumn(("learning", "rate"), "lr", "", 8, 4, lambda m: f"{m.learning_rate:.2e}"),
    ConsoleColumn(("step", "time"), "time", "", 8, 9, lambda m: _time(m.step_time_seconds)),
    ConsoleColumn(("tokens", "/s"), "tokens/s", "", 7, 7, lambda m: _count(m.tokens_per_second)),
    ConsoleColumn(
        ("TFLOP/s", "/rank"),
        "TFLOP/s per rank",
        "",
        7,
        3,
        lambda m: _flops(m.tflops_per_second_per_rank),
    ),
    ConsoleColumn(("data", "wait"), "data wait", "", 5, 2, _stall),
    ConsoleColumn(
        ("", "MFU"), "MFU", "", 5, 2, lambda m: None if m.mfu is None else f"{m.mfu:.1%}"
    ),
    ConsoleColumn(("MoE", "load"), "busiest expert", "", 5, 5, _load),
    ConsoleColumn(
        ("MoE", "entropy"),
        "entropy",
        "",
        7,
        1,
        lambda m: f"{m.routing.entropy:.3f}" if m.routing else None,
    ),
    ConsoleColumn(("loss", "scale"), "loss scale", "", 7, 3, lambda m: _power(m.loss_scale)),
    ConsoleColumn(
        ("{unit} allocated/", "peak/reserved"),
        "memory",
        " allocated/peak/reserved",
        17,
        6,
        _device_memory,
    ),
    ConsoleColumn(
        ("{unit} allocated", "/peak"), "memory", " allocated/peak", 17, 6, _counted_memory
    ),
    ConsoleColumn(("resident", "set"), "resident set", "", 9, 5, _resident_set),
)


def render_columns(metrics: StepMetrics) -> dict[ConsoleColumn, str]:
    """Column → text, for the numbers that a step has."""
    texts = {column: column.render(metrics) for column in COLUMNS}
    return {column: text for column, text in texts.items() if text is not None}
