"""Settings of ``fsdptoys plan``: target hardware and accuracy of the prediction."""

from dataclasses import dataclass
from enum import Enum

from fsdptoys.utils.bounds import above, at_least
from fsdptoys.utils.options import Effect, check_options, option


class AllocatorKind(Enum):
    """Mode of PyTorch's caching allocator on the device."""

    expandable = "expandable"
    """One growing segment per stream (``expandable_segments:True``), set by the launcher."""
    native = "native"
    """Segments of fixed size, PyTorch's default."""


@dataclass
class PlanConfig:
    """Assumptions of ``fsdptoys plan``."""

    hardware: str = option("auto", effect=Effect.none)
    """Profile in ``configs/hardware``, or a YAML file; auto for this node's device."""
    world_size: int | None = option(None, at_least(1, 2**24), effect=Effect.none)
    """Number of ranks to plan for; null for one node of that hardware."""
    memory_gib: float | None = option(None, above(0, 2**20), effect=Effect.none)
    """Device memory available to the allocator, in GiB; null for the profile's usable memory."""
    allocator: AllocatorKind = option(AllocatorKind.expandable, effect=Effect.none)
    """Mode of PyTorch's caching allocator on the device."""
    expert_imbalance: float = option(1.0, at_least(1, 2**20), effect=Effect.none)
    """Tokens of the busiest rank's experts under ``mesh.ep_size``, as a multiple of the mean; 1 for
    an even load."""
    rows: int = option(10, at_least(1, 10**6), effect=Effect.none)
    """Maximum number of combinations that ``plan search`` shows."""
    predict: bool = option(True, effect=Effect.none)
    """``train`` predicts memory and time before the run, and compares them with the measured
    values."""

    def __post_init__(self) -> None:
        check_options("plan", self)
