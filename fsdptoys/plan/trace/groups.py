"""Groups of ranks in a trace, and their mesh axes."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fsdptoys.parallel.mesh import AXES


@dataclass
class PlannedGroup:
    """A group of consecutive ranks that have no process group; the first one is traced."""

    axis: str
    ranks: int

    def size(self) -> int:
        """Number of ranks."""
        return self.ranks

    def rank(self) -> int:
        """Rank of the traced process."""
        return 0


def place_of(group: Any, name: str) -> tuple[tuple[int, int], str]:
    """Size and stride of a group, and its axis."""
    if isinstance(group, PlannedGroup):
        return (group.ranks, 1), group.axis
    ranks = dist.get_process_group_ranks(group)
    size, stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return (size, stride), axis_of(group.group_desc, name, stride, size == dist.get_world_size())


def axis_of(description: str, name: str, stride: int, everyone: bool) -> str:
    """Mesh axis of a group, by its mesh's description; the group of a one-axis mesh has none."""
    if (axis := description.removeprefix("mesh_")) in AXES:
        return axis
    if everyone and name not in ("all_gather", "reduce_scatter"):
        return "world"
    return "shard" if stride == 1 else "replicate"
