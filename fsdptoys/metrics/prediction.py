"""Predicted memory and time of a run's steps, and their comparison with the measurements."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fsdptoys.utils.bounds import above
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.text import gib_text, size_text


class Category(Enum):
    """Purpose of a block of device memory."""

    # A replay counts by category at every block: an Enum's own hash takes a call
    __hash__ = object.__hash__

    parameters = "parameters"
    """Shards of this rank, in the dtype that the optimizer updates."""
    gradients = "gradients"
    """Shards of this rank, reduced or to be reduced in place."""
    optimizer_states = "optimizer states"
    gathered_parameters = "gathered parameters"
    """Unsharded parameters of a unit, and buffers of the all-gather."""
    reduction_buffers = "reduction buffers"
    """Unsharded gradients of a unit, and buffers of the reduce-scatter or all-reduce."""
    exchange_buffers = "exchange buffers"
    """Messages between ranks that share sequences or split experts, as far as they are not kept as
    activations."""
    activations = "activations"
    """Tensors saved by the forward for the backward."""
    logits = "logits and loss"
    buffers = "buffers"
    """Tensors of the model other than parameters."""
    temporary = "temporary"
    """Everything else, such as temporaries of an operator."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted memory of one rank."""

    end_bytes: int
    """Allocated device memory after a step."""
    peak_bytes: int
    """Peak of allocated device memory."""
    reserved_bytes: int
    """Peak of reserved device memory."""
    peak_phase: str
    """Phase of the step in which the peak falls."""
    categories: dict[Category, int] = field(default_factory=dict)
    """Bytes of each category at the peak."""
    streams: dict[str, int] = field(default_factory=dict)
    """Stream → reserved bytes."""
    host_bytes: int = 0
    """Host memory of the rank, in bytes."""


@dataclass(frozen=True)
class Volume:
    """Transfers of one type of collective over one mesh axis in a step."""

    collective: str
    axis: str
    group_size: int = field(metadata={"extrapolates": False})
    calls: int
    bytes: int
    """Bytes sent by one rank."""
    seconds: float


@dataclass(frozen=True)
class TimePrediction:
    """Predicted time of one step, in seconds."""

    step_seconds: float = field(metadata=above(0, 1e15))
    compute_seconds: float
    """Busy time of the compute stream; ``kinds`` splits it by operation."""
    exposed_communication_seconds: float
    """Time that the compute stream waits for collectives."""
    exposed_transfer_seconds: float
    """Time that it waits for copies between host and device."""
    host_seconds: float
    """Time that it waits for the host to launch kernels or to update offloaded parameters."""
    kinds: dict[str, float] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    stage_seconds: float = 0.0
    """Time that it waits for other pipeline ranks."""


@dataclass(frozen=True)
class StagePrediction:
    """Predicted memory and time of one rank of a pipeline."""

    layers: str
    """Indices of its layers, such as ``0-3, 8-11`` with two stages on each rank."""
    peak_bytes: int
    reserved_bytes: int
    compute_seconds: float
    """Busy time of the compute stream in a step."""
    wait_seconds: float
    """Time in a step in which it waits for other pipeline ranks: the bubble."""


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a run, and the method of the prediction."""

    method: str
    """``estimated``; earlier versions also had others."""
    hardware: str
    world_size: int
    tokens_per_step: int
    """Tokens of all ranks."""
    model_flops_per_step: float
    """Model FLOPs of one rank."""
    peak_flops: float | None = field(metadata=above(0))
    """FLOP/s of one device in the dtype of the matmuls; None if unknown."""
    memory: MemoryPrediction
    time: TimePrediction
    caveats: tuple[str, ...] = ()
    """Unknowns of the prediction, one sentence each, with an error band if known."""
    device_type: str = "cuda"
    stages: tuple[StagePrediction, ...] = ()
    """Ranks of a pipeline, in order; ``memory`` is that of the largest, ``time`` that of the
    busiest."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens_per_step / self.time.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the peak in the dtype of the matmuls; runs measure it for
        bfloat16 only."""
        return (
            self.model_flops_per_step / self.time.step_seconds / self.peak_flops
            if self.peak_flops
            else None
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain JSON types."""
        tree = dataclasses.asdict(self)
        tree["memory"]["categories"] = {
            kind.value: size for kind, size in self.memory.categories.items()
        }
        return tree | {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Prediction":
        """Construct a prediction from the output of ``to_dict``; ForeignError if of another version
        or out of range."""
        derived = ("tokens_per_second", "mfu")
        fields = {name: value for name, value in tree.items() if name not in derived}
        if "doubts" in fields:  # the name in earlier versions
            fields["caveats"] = fields.pop("doubts")
        return build(cls, fields)


FLAGGED = 0.10
"""Relative difference from the measurement above which a prediction is flagged."""


@dataclass(frozen=True)
class PredictionError:
    """A predicted and a measured number."""

    quantity: str
    predicted: float
    measured: float
    unit: str

    @property
    def difference(self) -> float:
        """Relative difference of the prediction from the measurement; positive if too high."""
        return self.predicted / self.measured - 1 if self.measured else math.inf

    @property
    def flagged(self) -> bool:
        """Whether the difference exceeds ``FLAGGED``."""
        return abs(self.difference) > FLAGGED


def prediction_line(prediction: Prediction, memory_bytes: float) -> str:
    """One line with the prediction, shown before the model is built; ``memory_bytes`` are those of
    the allocator."""
    memory = prediction.memory
    where = f"({prediction.method}, plan.hardware={prediction.hardware})"
    seconds = prediction.time.step_seconds
    duration = f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
    text = (
        f"predicted {duration} per step, {prediction.tokens_per_second:,.0f} tokens/s"
    )
    if prediction.device_type == "cpu":
        return f"{text} {where}"
    over = (
        f", more than the {size_text(round(memory_bytes))} available"
        if memory.reserved_bytes > memory_bytes
        else ""
    )
    peak = size_text(round(memory.peak_bytes))
    reserved = size_text(round(memory.reserved_bytes))
    return f"{text}, {peak} peak, {reserved} reserved{over} {where}"


def prediction_rows(
    comparisons: Sequence[PredictionError],
) -> list[tuple[str, str, str, str]]:
    """Rows of the summary's table."""
    return [
        (
            comparison.quantity,
            _number(comparison.predicted, comparison.unit),
            _number(comparison.measured, comparison.unit),
            f"**{comparison.difference:+.1%}**, over {FLAGGED:.0%}"
            if comparison.flagged
            else f"{comparison.difference:+.1%}",
        )
        for comparison in comparisons
    ]


def _number(value: float, unit: str) -> str:
    if unit == "GiB":
        return gib_text(value)
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return f"{text} {unit}".strip()
