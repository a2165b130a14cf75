"""Flat slices: what each rank owns, when parameters are cut evenly whatever their shapes.

    parameters   [    w3    ][  w2  ][      w1      ]░   in reverse order of the forward; ░: padding to a multiple of N
    bucket       [───────────────────────────────────]   one flat buffer: the parameters' own memory from now on
    slices       [     rank 0      |     rank 1      ]   1/N of every bucket
    pieces       [    w3    ]
                             [ w2a ]|[w2b][    w1    ]   a rank's slice, parameter by parameter

An optimizer over a rank's pieces keeps states for 1/N of the elements, whatever kind of optimizer it is, as long as it
works element by element (SGD, Adam, AdamW, …): a piece knows neither its parameter's shape nor the rest of it. Pieces
are views of the parameters, so updating them updates the parameters in place, and one all-gather a bucket, in place
too, gives every rank the others' slices.

Padding costs less than N elements a bucket. Sent by ``publish``: P·(N−1)/N.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import assign_buckets

# Renamed in torch 2.13, where the old names warn.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SlicedBucket:
    """Some parameters in one flat buffer, of which each rank owns a slice."""

    def __init__(self, params: list[nn.Parameter], ranks: int, rank: int) -> None:
        self.params = params
        self.starts: list[int] = []
        length = 0
        for param in params:
            self.starts.append(length)
            length += param.numel()
        self.slice_length = -(-length // ranks)
        self.flat = torch.zeros(self.slice_length * ranks, dtype=params[0].dtype, device=params[0].device)
        self.own = self.flat[rank * self.slice_length : (rank + 1) * self.slice_length]
        self.pieces: list[nn.Parameter] = []
        for slot, param in enumerate(params):
            view = self.part_of(self.flat, slot)
            view.copy_(param.detach())
            param.data = view
            low, high = self.span(slot, rank)
            self.pieces.append(nn.Parameter(view.view(-1)[low:high]))

    def part_of(self, flat: Tensor, slot: int) -> Tensor:
        """A parameter's part of a buffer laid out as the bucket is, in the parameter's shape."""
        param = self.params[slot]
        return flat[self.starts[slot] : self.starts[slot] + param.numel()].view(param.shape)

    def span(self, slot: int, rank: int) -> tuple[int, int]:
        """First and past-the-last of a parameter's elements that a rank owns; equal where it owns none."""
        start, length = self.starts[slot], self.params[slot].numel()
        low, high = (min(max(rank * self.slice_length - start, 0), length) for rank in (rank, rank + 1))
        return low, high

    def piece_of(self, own: Tensor, slot: int, rank: int) -> Tensor:
        """A parameter's part of a tensor laid out as this rank's slice is."""
        low, high = self.span(slot, rank)
        first = self.starts[slot] + low - rank * self.slice_length
        return own[first : first + high - low] if high > low else own[:0]


class Slices:
    """All parameters of a module that require gradients, cut evenly over the ranks of a group.

    Args:
        module: whose parameters move into buckets; only their memory changes.
        group: over whose ranks.
        bucket_bytes: from which on a bucket is full.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        params = [param for param in module.parameters() if param.requires_grad][::-1]
        self.buckets = [
            SlicedBucket([params[number] for number in numbers], self.ranks, self.rank)
            for numbers in assign_buckets(params, [bucket_bytes])
        ]
        self.places = {param: (bucket, slot) for bucket in self.buckets for slot, param in enumerate(bucket.params)}

    def piece(self, param: nn.Parameter) -> nn.Parameter:
        """What this rank owns of a parameter, flat; empty where that is nothing."""
        bucket, slot = self.places[param]
        return bucket.pieces[slot]

    def pieces(self) -> Iterator[nn.Parameter]:
        """Of all parameters, for an optimizer."""
        for bucket in self.buckets:
            yield from bucket.pieces

    def spans(self, param: nn.Parameter) -> list[tuple[int, int]]:
        """Rank by rank, which of a parameter's elements it owns."""
        bucket, slot = self.places[param]
        return [bucket.span(slot, rank) for rank in range(self.ranks)]

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank all slices, after each has updated its own."""
        # The slice is copied, since not every backend gathers from where it gathers to.
        works = [
            all_gather_flat(bucket.flat, bucket.own.clone(), group=self.group, async_op=True) for bucket in self.buckets
        ]
        for work in works:
            work.wait()
