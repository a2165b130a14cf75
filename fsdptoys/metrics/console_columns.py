"""Columns of a step's numbers, for the plain and the live console."""

from collections.abc import Callable
from dataclasses import dataclass

from .step import StepMetrics


@dataclass(frozen=True)
class ConsoleColumn:
    """Format of one number of a step on both consoles."""

    heading: tuple[str, str]
    """Two short lines above the column of the live table."""
    label: str
    """Text before the value in a plain line; ``unit`` follows the value."""
    unit: str
    width: int
    """Characters in the live table."""
    importance: int
    """A narrow terminal omits the columns of lowest importance."""
    render: Callable[[StepMetrics], str]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def _flops(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _stall(metrics: StepMetrics) -> float:
    return (metrics.data_wait_seconds or 0.0) / metrics.step_time_seconds


def _load(value: float) -> str:
    return f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def _gib(*values: float | None) -> str:
    return "/".join("?" if value is None else f"{value:.4g}" for value in values)


COLUMNS = (
    ConsoleColumn(("", "loss"), "loss", "", 7, 10, lambda m: f"{m.loss:.4f}"),
    ConsoleColumn(("grad", "norm"), "grad norm", "", 7, 8, lambda m: f"{m.grad_norm:.4g}"),
    ConsoleColumn(("learning", "rate"), "lr", "", 8, 4, lambda m: f"{m.learning_rate:.2e}"),
    ConsoleColumn(("step", "time"), "time", "", 8, 9, lambda m: _time(m.step_time_seconds)),
    ConsoleColumn(("tokens", "/s"), "tokens/s", "", 7, 7, lambda m: _count(m.tokens_per_second)),
    ConsoleColumn(("TFLOP/s", "/rank"), "TFLOP/s per rank", "", 7, 3, lambda m: _flops(m.tflops_per_second_per_rank)),
)
"""Columns of every device."""

DATA_COLUMN = ConsoleColumn(("data", "wait"), "data wait", "", 5, 2, lambda m: f"{_stall(m):.1%}")
"""Fraction of the step time that rank 0 waited for its batches, if it was measured."""

MFU_COLUMN = ConsoleColumn(("", "MFU"), "MFU", "", 5, 2, lambda m: f"{(m.mfu or 0.0):.1%}")
"""For devices with known peak FLOP/s."""

ROUTING_COLUMNS = (
    ConsoleColumn(
        ("MoE", "load"), "busiest expert", "", 5, 5, lambda m: _load(m.routing.max_load if m.routing else 0.0)
    ),
    ConsoleColumn(("MoE", "entropy"), "entropy", "", 7, 1, lambda m: f"{m.routing.entropy if m.routing else 0.0:.3f}"),
)
"""For models with experts: tokens of the busiest expert over its layer's mean, and entropy of the shares."""

DEVICE_MEMORY_COLUMN = ConsoleColumn(
    ("GiB allocated/", "peak/reserved"),
    "memory",
    " GiB allocated/peak/reserved",
    17,
    6,
    lambda m: _gib(m.memory_allocated_gib, m.memory_peak_gib, m.memory_reserved_gib),
)

RESIDENT_SET_COLUMN = ConsoleColumn(
    ("resident", "set"), "resident set", "", 9, 6, lambda m: f"{_gib(m.resident_set_gib)} GiB"
)
"""For CPUs."""


def columns_for(metrics: StepMetrics) -> list[ConsoleColumn]:
    """The columns of the numbers that a step has, which depend on device and model."""
    columns = list(COLUMNS)
    if metrics.data_wait_seconds is not None:
        columns.append(DATA_COLUMN)
    if metrics.mfu is not None:
        columns.append(MFU_COLUMN)
    if metrics.routing is not None:
        columns += ROUTING_COLUMNS
    columns.append(RESIDENT_SET_COLUMN if metrics.memory_allocated_gib is None else DEVICE_MEMORY_COLUMN)
    return columns
