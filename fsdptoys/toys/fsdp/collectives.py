"""The three collectives of FSDP, all asynchronous: each returns a ``Work`` whose ``wait`` orders what comes after it.

On a GPU ``wait`` makes the current stream wait, on a CPU the thread. No other synchronisation is needed, and no stream:
NCCL and gloo run collectives beside the computation by themselves.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(flat: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill ``flat`` with the shards of all ranks, in their order."""
    # Renamed in torch 2.13, where the old name warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(flat, shard, group=group, async_op=True)


def reduce_scatter(shard: Tensor, flat: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> dist.Work:
    """Combine the ``flat`` of all ranks and give each rank its part of the result."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(shard, flat, op=op, group=group, async_op=True)


def all_reduce(tensor: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> dist.Work:
    """Combine the ``tensor`` of all ranks in place."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)


@dataclass(frozen=True)
class Averaging:
    """How a reduction over ranks is made a mean: by the collective itself, or by divisions around a sum."""

    op: dist.ReduceOp
    before: float = 1.0
    """Divides what goes in."""
    after: float = 1.0
    """Divides what comes out."""


def averaging(ranks: int, dtype: torch.dtype, device: torch.device, factor: float | None, only_sums: bool) -> Averaging:
    """Choose it.

    Args:
        ranks: whose gradients are combined.
        dtype: that they are combined in.
        device: where they are. gloo's own mean adds up silently in older versions, so that on a CPU we divide.
        factor: what to divide by instead of ``ranks``.
        only_sums: never leave the division to the collective.
    """
    accelerated = device.type != "cpu"
    wide = dtype in (torch.float32, torch.bfloat16)
    if wide and accelerated and factor is None and not only_sums and ranks > 1:
        return Averaging(dist.ReduceOp.AVG)  # type: ignore[arg-type]
    factor = float(ranks) if factor is None else factor
    before = 1.0
    if not wide:
        # float16 overflows at 65504: the sum is kept as far from it as its parts are from underflow.
        while factor % before == 0 and factor / before > before:
            before *= 2
    return Averaging(dist.ReduceOp.SUM, before, factor / before)  # type: ignore[arg-type]
