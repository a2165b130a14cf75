"""Columns of a step's numbers, for the plain and the live console."""

import math
from collections.abc import Callable

from fsdptoys.device import GIB
from fsdptoys.utils.text import fitting_unit

from .step import StepMetrics


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
    unit, size = fitting_unit(
        GIB * max((value for value in gib if value is not None), default=0.0)
    )
    return (
        "/".join("?" if value is None else f"{value * GIB / size:.4g}" for value in gib)
        + f" {unit}"
    )


def _memory(metrics: StepMetrics) -> str | None:
    allocated = metrics.memory_allocated_gib
    peak = metrics.memory_peak_gib
    if metrics.memory_reserved_gib is not None:
        return f"{_sizes(allocated, peak, metrics.memory_reserved_gib)} allocated/peak/reserved"
    return None if allocated is None else f"{_sizes(allocated, peak)} allocated/peak"


def _resident_set(metrics: StepMetrics) -> str | None:
    return (
        _sizes(metrics.resident_set_gib)
        if metrics.memory_reserved_gib is None
        else None
    )


COLUMNS: tuple[tuple[str, Callable[[StepMetrics], str | None]], ...] = (
    ("loss", lambda m: f"{m.loss:.4f}"),
    ("grad norm", lambda m: f"{m.grad_norm:.4g}"),
    ("lr", lambda m: f"{m.learning_rate:.2e}"),
    ("time", lambda m: _time(m.step_time_seconds)),
    ("tokens/s", lambda m: _count(m.tokens_per_second)),
    ("TFLOP/s per rank", lambda m: _flops(m.tflops_per_second_per_rank)),
    ("data wait", _stall),
    ("MFU", lambda m: None if m.mfu is None else f"{m.mfu:.1%}"),
    ("busiest expert", _load),
    ("entropy", lambda m: f"{m.routing.entropy:.3f}" if m.routing else None),
    ("loss scale", lambda m: _power(m.loss_scale)),
    ("memory", _memory),
    ("resident set", _resident_set),
)
"""Label of a number, and its text; None if the step does not have it, which depends on device and
model."""


def render_columns(metrics: StepMetrics) -> dict[str, str]:
    """Label → text, for the numbers that a step has."""
    texts = {label: render(metrics) for label, render in COLUMNS}
    return {label: text for label, text in texts.items() if text is not None}
