"""The dim along which FSDP2 shards a parameter."""

from typing import TYPE_CHECKING

from torch import nn

from .expert_parallel import expert_dim, expert_placement
from .mesh import Axes

if TYPE_CHECKING:  # the command line composes configs without loading DTensor
    from torch.distributed.tensor import Shard


def placement(param: nn.Parameter, ranks: int) -> "Shard | None":
    """The dim along which N ranks shard a parameter; None for FSDP2's default, the first.

    Where the ranks do not divide a stack of experts (more ranks than experts never do), some would
    hold padding, or nothing else. Other dims than the first must divide evenly; gathering them
    costs a copy.
    """
    from torch.distributed.tensor import Shard

    if param.ndim < 3 or param.shape[0] % ranks == 0:
        return None
    dim = expert_dim(param.shape, ranks)
    return None if dim is None else Shard(dim)


def sharding(param: nn.Parameter, axes: Axes) -> tuple[int, int]:
    """The dim along which FSDP2 shards a full parameter, and over how many ranks."""
    if axes.ep > 1 and param.ndim == 3:
        return expert_placement(param, axes.efsdp).dim, axes.efsdp
    chosen = placement(param, axes.shard)
    return chosen.dim if chosen is not None else 0, axes.shard
