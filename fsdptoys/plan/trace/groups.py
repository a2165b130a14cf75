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
    """Size and stride of a group, and its mesh axis, by its mesh's description; the group of a
    one-axis mesh has none."""
    if isinstance(group, PlannedGroup):
        return (group.ranks, 1), group.axis
    ranks = dist.get_process_group_ranks(group)
    size = len(ranks)
    stride = ranks[1] - ranks[0] if size > 1 else 1
    axis = group.group_desc.removeprefix("mesh_")
    if axis not in AXES:
        axis = "shard" if stride == 1 else "replicate"
        if size == dist.get_world_size() and name not in (
            "all_gather",
            "reduce_scatter",
        ):
            axis = "world"
    return (size, stride), axis
