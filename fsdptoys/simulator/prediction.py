"""What is foretold of one rank's steps."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.typed import build

from .events import Category


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
