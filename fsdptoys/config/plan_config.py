"""Settings of ``fsdptoys plan``: target hardware and accuracy of the prediction."""

import math
from dataclasses import dataclass
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_at_most


class AllocatorKind(Enum):
    """Mode of PyTorch's caching allocator on the device."""

    expandable = "expandable"
    """One growing segment per stream (``expandable_segments:True``), set by the launcher."""
    native = "native"
    """Segments of fixed size, PyTorch's default."""


@dataclass
class PlanConfig:
    """Assumptions of ``fsdptoys plan``."""

    hardware: str = "auto"
    """Profile in ``configs/hardware``, or a YAML file; auto for this machine's device."""
    world_size: int | None = None
    """Number of ranks to plan for; null for one node of that hardware."""
    memory_gib: float | None = None
    """Device memory available to the allocator, in GiB; null for the profile's usable memory."""
    exact: bool = False
    """Trace every layer instead of extrapolating from a few."""
    allocator: AllocatorKind = AllocatorKind.expandable
    """Mode of PyTorch's caching allocator on the device."""
    rows: int = 10
    """Maximum number of combinations that ``plan search`` shows."""
    predict: bool = True
    """``train`` predicts memory and time before the run, and compares them with the measured values."""

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
