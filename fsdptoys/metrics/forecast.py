"""What was foretold of a run beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdptoys.device import GIB
from fsdptoys.simulator.prediction import Prediction

if TYPE_CHECKING:
    from .summary import RunResults

FLAGGED = 0.10
"""A difference over this share of what was measured is flagged."""


@dataclass(frozen=True)
class Comparison:
    """One number, foretold and measured."""

    what: str
    predicted: float
    measured: float
    unit: str

    @property
    def difference(self) -> float:
        """Share of what was measured by which the prediction is over it."""
        return self.predicted / self.measured - 1

    @property
    def flagged(self) -> bool:
        """Whether they differ by more than a prediction should."""
        return abs(self.difference) > FLAGGED


def compare(prediction: Prediction, results: "RunResults") -> list[Comparison]:
    """Hold a prediction against the steps after the warm-up; on a CPU there is no device memory to compare.

    What was measured as nothing, as the speed of steps without a valid token, is left out: no share of it can be told.
    """
    found: list[Comparison] = []
    if results.step_time_seconds is not None:
        median = results.step_time_seconds.median
        found.append(Comparison("step time", prediction.time.step_seconds * 1e3, median * 1e3, "ms"))
    if results.tokens_per_second is not None:
        median = results.tokens_per_second.median
        found.append(Comparison("tokens/s, all ranks", prediction.tokens_per_second, median, ""))
    if results.mfu is not None and prediction.mfu is not None:
        found.append(Comparison("MFU", prediction.mfu * 100, results.mfu.median * 100, "%"))
    memory = prediction.memory
    for what, foretold, measured in (
        ("device memory after a step", memory.end_bytes, results.memory_allocated_gib),
        ("peak device memory", memory.peak_bytes, results.memory_peak_gib),
        ("reserved device memory", memory.reserved_bytes, results.memory_reserved_gib),
    ):
        if measured is not None:
            found.append(Comparison(what, foretold / GIB, measured, "GiB"))
    return [each for each in found if each.measured]


def forecast_line(prediction: Prediction, memory_bytes: float) -> str:
    """One line before anything is built.

    Args:
        prediction: of the run.
        memory_bytes: that the allocator can have.
    """
    memory, where = prediction.memory, f"({prediction.method}, plan.hardware={prediction.hardware})"
    told = f"predicted {_seconds(prediction.time.step_seconds)} a step, {prediction.tokens_per_second:,.0f} tokens/s"
    if prediction.device_type == "cpu":
        return f"{told} {where}"
    peak, reserved = memory.peak_bytes / GIB, memory.reserved_bytes / GIB
    over = f", over the {memory_bytes / GIB:.2f} GiB that it can have" if memory.reserved_bytes > memory_bytes else ""
    return f"{told}, {peak:.2f} GiB at the peak, {reserved:.2f} GiB reserved{over} {where}"


def forecast_rows(comparisons: Sequence[Comparison]) -> list[tuple[str, str, str, str]]:
    """Cells of the summary's table."""
    return [
        (
            each.what,
            _number(each.predicted, each.unit),
            _number(each.measured, each.unit),
            f"**{each.difference:+.1%}**, over {FLAGGED:.0%}" if each.flagged else f"{each.difference:+.1%}",
        )
        for each in comparisons
    ]


def _number(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return f"{text} {unit}".strip()


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:.2f} s"
