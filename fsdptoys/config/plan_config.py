"""Settings of ``fsdptoys plan``: target hardware and accuracy of the prediction."""

from dataclasses import dataclass, field
from enum import Enum

from fsdptoys.utils.bounds import above, at_least, check_bounds


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
    """Profile in ``configs/hardware``, or a YAML file; auto for this node's device."""
    world_size: int | None = field(default=None, metadata=at_least(1, 2**24))
    """Number of ranks to plan for; null for one node of that hardware."""
    memory_gib: float | None = field(default=None, metadata=above(0, 2**20))
    """Device memory available to the allocator, in GiB; null for the profile's usable memory."""
    exact: bool = False
    """Trace every layer instead of extrapolating from a few."""
    allocator: AllocatorKind = AllocatorKind.expandable
    """Mode of PyTorch's caching allocator on the device."""
    expert_imbalance: float = field(default=1.0, metadata=at_least(1, 2**20))
    """Tokens of the busiest rank's experts under ``mesh.ep_size``, as a multiple of the mean; 1 for an even load."""
    rows: int = field(default=10, metadata=at_least(1, 10**6))
    """Maximum number of combinations that ``plan search`` shows."""
    predict: bool = True
    """``train`` predicts memory and time before the run, and compares them with the measured values."""

    def __post_init__(self) -> None:
        check_bounds("plan", self)
