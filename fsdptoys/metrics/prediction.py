"""What was foretold of a run beside what was measured.

What is foretold of one rank's steps.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from fsdptoys.device import GIB
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import build


class Category(Enum):
    """What a block of device memory is for."""

    parameters = "parameters"
    """This rank's part of them, in the number format that the optimizer updates."""
    gradients = "gradients"
    """This rank's part of them, reduced or to be reduced in place."""
    optimizer_states = "optimizer states"
    gathered_parameters = "gathered parameters"
    """Whole parameters of a unit, and the buffers that they are gathered through."""
    reduction_buffers = "reduction buffers"
    """Whole gradients of a unit, and the buffers that they are reduced through."""
    activations = "activations"
    """What a forward leaves for the backward."""
    logits = "logits and loss"
    buffers = "buffers"
    """Tables of the model that are no parameters."""
    temporary = "temporary"
    """Everything else: what lives within an operator's neighbourhood."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes of device memory on one rank."""

    end_bytes: int
    """Allocated after a step."""
    peak_bytes: int
    """Most that is allocated at a time."""
    reserved_bytes: int
    """Most that the allocator holds."""
    peak_phase: str
    """Phase of the step in which the peak falls."""
    categories: dict[Category, int] = field(default_factory=dict)
    """Of what the peak consists."""
    streams: dict[str, int] = field(default_factory=dict)
    """Reserved by stream."""
    host_bytes: int = 0
    """That the rank keeps in host memory."""


@dataclass(frozen=True)
class Volume:
    """What one kind of collective moves over one axis in a step."""

    collective: str
    axis: str
    group_size: int = field(metadata={"extrapolates": False})
    calls: int
    bytes: int
    """That one rank sends."""
    seconds: float


@dataclass(frozen=True)
class TimePrediction:
    """Seconds of one step."""

    step_seconds: float
    compute_seconds: float
    """The computing stream is busy; by kind in ``kinds``."""
    exposed_communication_seconds: float
    """The computing stream waits for collectives."""
    exposed_transfer_seconds: float
    """It waits for copies between host and device."""
    host_seconds: float
    """It waits for the host: to issue operators, to update offloaded parameters."""
    kinds: dict[str, float] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """All that is foretold, and how."""

    method: str
    """``traced``, ``traced, all layers``, ``closed form``."""
    hardware: str
    world_size: int
    tokens_per_step: int
    """Of all ranks."""
    model_flops_per_step: float
    """Of one rank."""
    peak_flops: float | None
    """Of a device, in the dtype of the products."""
    memory: MemoryPrediction
    time: TimePrediction
    doubts: tuple[str, ...] = ()
    """What the model does not know here, each in a sentence with an error band where there is one."""
    device_type: str = "cuda"

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens_per_step / self.time.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the peak in the dtype of the products; a run tells it for bfloat16 alone."""
        return self.model_flops_per_step / self.time.step_seconds / self.peak_flops if self.peak_flops else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it, with what follows from it."""
        tree = dataclasses.asdict(self)
        tree["memory"]["categories"] = {kind.value: size for kind, size in self.memory.categories.items()}
        return tree | {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Prediction":
        """What ``to_dict`` wrote, read back.

        Raises:
            ForeignError: if it is of another version, or holds a number that cannot be.
        """
        found = build(cls, {name: tree[name] for name in tree if name not in ("tokens_per_second", "mfu")})
        if found.time.step_seconds <= 0 or (found.peak_flops is not None and found.peak_flops <= 0):
            raise ForeignError("time.step_seconds and peak_flops must be above 0")
        return found


if TYPE_CHECKING:
    from .results import (
        RunResults,
    )

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
