"""Flat slices: parameters cut evenly over ranks, whatever their shapes.

    parameters   [    w3    ][  w2  ][      w1      ]░  in reverse order of the forward; ░: padding
    bucket       [───────────────────────────────────]  one flat buffer, the parameters' memory
    slices       [     rank 0      |     rank 1      ]  1/N of every bucket
    pieces       [    w3    ]
                             [ w2a ]|[w2b][    w1    ]  a rank's slice, parameter by parameter

An optimizer over a rank's pieces keeps states for 1/N of the elements. It must work element by
element (SGD, Adam, AdamW, …), since a piece has neither its parameter's shape nor its other
elements. Pieces are views of the parameters: their update is in place, and ``publish`` sends it to
the other ranks, P·(N−1)/N a step. Padding is below N elements a bucket.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import assign_buckets

# torch 2.13 renamed both; the old names warn there.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SlicedBucket:
    """Parameters in one flat buffer. Each rank owns a slice of it."""

    def __init__(self, params: list[nn.Parameter], ranks: int, rank: int) -> None:
        self.params = params
        *self.starts, length = itertools.accumulate((param.numel() for param in params), initial=0)
        self.slice_length = -(-length // ranks)
        self.flat = torch.zeros(
            self.slice_length * ranks, dtype=params[0].dtype, device=params[0].device
        )
        self.own = self.flat[rank * self.slice_length : (rank + 1) * self.slice_length]
        self.pieces: list[nn.Parameter] = []
        for slot, param in enumerate(params):
            view = self.part_of(self.flat, slot)
            view.copy_(param.detach())
            param.data = view
            low, high = self.span(slot, rank)
            self.pieces.append(nn.Parameter(view.view(-1)[low:high]))

    def part_of(self, flat: Tensor, slot: int) -> Tensor:
        """Return a parameter's part, in its shape, of a buffer with the bucket's layout."""
        param = self.params[slot]
        start = self.starts[slot]
        return flat[start : start + param.numel()].view(param.shape)

    def span(self, slot: int, rank: int) -> tuple[int, int]:
        """Return the half-open range of a parameter's elements that ``rank`` owns; it may be
        empty."""
        start = self.starts[slot]
        length = self.params[slot].numel()
        low, high = (
            min(max(rank * self.slice_length - start, 0), length) for rank in (rank, rank + 1)
        )
        return low, high

    def piece_of(self, own: Tensor, slot: int, rank: int) -> Tensor:
        """Return a parameter's part of a tensor with the layout of the slice of ``rank``."""
        low, high = self.span(slot, rank)
        first = self.starts[slot] + low - rank * self.slice_length
        return own[first : first + high - low] if high > low else own[:0]


class Slices:
    """The trainable parameters of a module, cut evenly over the ranks of a group.

    Args:
        module: its parameters move into buckets; nothing but their memory changes.
        group: ranks to cut over.
        bucket_bytes: bytes that fill a bucket.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        params = [param for param in module.parameters() if param.requires_grad][::-1]
        self.buckets = [
            SlicedBucket([params[number] for number in numbers], self.ranks, self.rank)
            for numbers in assign_buckets(params, bucket_bytes)
        ]
        self.places = {
            param: (bucket, slot)
            for bucket in self.buckets
            for slot, param in enumerate(bucket.params)
        }

    def pieces(self) -> Iterator[nn.Parameter]:
        """Yield this rank's piece of every parameter, flat and maybe empty, for an optimizer."""
        for bucket in self.buckets:
            yield from bucket.pieces

    @torch.no_grad()
    def publish(self) -> None:
        """All-gather every bucket after each rank has updated its slice."""
        # Clones, since not every backend can gather in place.
        works = [
            all_gather_flat(bucket.flat, bucket.own.clone(), group=self.group, async_op=True)
            for bucket in self.buckets
        ]
        for work in works:
            work.wait()
