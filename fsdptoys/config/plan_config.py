"""The settings of ``fsdptoys plan``: which hardware a run is imagined on, and how carefully."""

import math
from dataclasses import dataclass
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_at_most


class AllocatorKind(Enum):
    """How the device's allocator takes memory."""

    expandable = "expandable"
    """One segment a stream that grows (``expandable_segments:True``), as the launcher sets it."""
    native = "native"
    """Segments of fixed size, PyTorch's default."""


@dataclass
class PlanConfig:
    """What ``fsdptoys plan`` assumes."""

    hardware: str = "auto"
    """A profile of ``configs/hardware``, or a YAML file; auto for that of this machine's device."""
    world_size: int | None = None
    """Ranks to plan for; null for one machine of that hardware."""
    memory_gib: float | None = None
    """Memory of a device that the allocator may take; null for all that the profile leaves it."""
    exact: bool = False
    """Trace every layer, where otherwise a few are traced and the rest follow."""
    allocator: AllocatorKind = AllocatorKind.expandable
    """How the device's allocator takes memory."""
    rows: int = 10
    """Most combinations that ``plan search`` shows."""
    predict: bool = True
    """Let ``train`` say before the run what it will take, and hold it against what it took."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        check_at_most("plan", self, world_size=2**24, rows=10**6, memory_gib=2**20)
        for name in ("world_size", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                fix = "plan.rows=10" if name == "rows" else "plan.world_size=8"
                raise ConfigError(f"plan.{name}={value} must be at least 1; set {fix}")
        if self.memory_gib is not None and not (math.isfinite(self.memory_gib) and self.memory_gib > 0):
            raise ConfigError(
                f"plan.memory_gib={self.memory_gib} must be a finite number above 0; set plan.memory_gib=80, or null "
                "for all that the hardware has"
            )
