"""ZeRO-2 from scratch: gradients are reduced to the rank that needs them, and nowhere kept whole.

                 rank 0                             rank 1
    backward     bucket of gradients ─ reduce-scatter ─ bucket of gradients     freed as soon as it is sent
                 slice 0 of their mean                  slice 1 of their mean   gradients: 1/N
    step         update slice 0                         update slice 1          states: 1/N
    publish      slices 0 and 1 ←──── all-gather ────→  slices 0 and 1

An all-reduce is a reduce-scatter and an all-gather of its result. ZeRO-1's ranks need only a slice of that result, so
the second half is left out, and what it cost pays for the all-gather of parameters: as many bytes as DDP, with 1/N of
states and gradients.

A bucket's buffer is made when its first gradient comes, takes each gradient over (and the gradient is freed), leaves
when the last has come, and is freed when it has arrived; two are on their way at most. Buckets leave in a fixed order,
as in DDP. A parameter that a rank's loss does not use counts as zeros, at the end of the backward.

Every backward reduces. Gradients of several micro-batches add up in the slices: accumulating them whole and reducing
once would send less, and need P of memory again.

On each rank, for P of parameters and S of states: P parameters, P/N gradients (and three buckets), S/N states, to
padding. Sent a backward: P·(N−1)/N to reduce-scatter; a step: P·(N−1)/N to all-gather.

Left out: buckets in the order of the first backward (slices would have to move), reentrant backward passes, parameters
that no rank uses keeping no gradient (it is zero here). As in :mod:`.slices`, the optimizer works element by element.
Source: arXiv:1910.02054 (P_os+g)
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd_graph import queue_callback
from .buckets import broadcast_together
from .flat_slices import SlicedBucket, Slices, reduce_scatter_flat

IN_FLIGHT = 2
"""Buckets on their way at most; the oldest is waited for before another leaves."""


class Zero2(nn.Module):
    """A module whose gradients are reduced to slices; the optimizer is built over ``pieces()`` and attached.

    Args:
        module: the same on all ranks; rank 0's values count.
        process_group: over whose ranks; None for all.
        bucket_cap_mb: size of the buckets.
        reduce_dtype: number format of the sums over ranks; None for the parameters'.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self.reduce_dtype = module, reduce_dtype
        group: Any = process_group or dist.group.WORLD
        broadcast_together([*module.parameters(), *module.buffers()], 0, group)
        self.slices = Slices(module, group, int(bucket_cap_mb * 2**20))
        self._gradients: dict[SlicedBucket, Tensor] = {}
        self._flying: list[tuple[SlicedBucket, Tensor, Any]] = []
        self._runs = False
        for param in self.slices.places:
            param.register_post_accumulate_grad_hook(self._take)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def pieces(self) -> Iterator[nn.Parameter]:
        """What this rank updates, for an optimizer."""
        return self.slices.pieces()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange updates after each of an optimizer's steps."""
        optimizer.register_step_post_hook(lambda *_: self.slices.publish())

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Move a gradient into its bucket, and send what is complete."""
        if not self._runs:
            self._runs = True
            self._next = 0
            self._pending = {bucket: len(bucket.params) for bucket in self.slices.buckets}
            queue_callback(self._finish)
        bucket, slot = self.slices.places[param]  # type: ignore[index]
        assert param.grad is not None
        into = bucket.part_of(self._gradient(bucket), slot)
        torch.mul(param.grad.to(into.dtype), 1.0 / self.slices.ranks, out=into)
        param.grad = None
        self._pending[bucket] -= 1
        buckets = self.slices.buckets
        while self._next < len(buckets) and self._pending[buckets[self._next]] == 0:
            self._send_next()

    def _gradient(self, bucket: SlicedBucket) -> Tensor:
        if bucket not in self._gradients:
            self._gradients[bucket] = torch.zeros_like(bucket.flat, dtype=self.reduce_dtype)
        return self._gradients[bucket]

    def _send_next(self) -> None:
        bucket = self.slices.buckets[self._next]
        self._next += 1
        while len(self._flying) >= IN_FLIGHT:
            self._land()
        gradient = self._gradient(bucket)
        own = gradient.new_empty(bucket.slice_length)
        self._flying.append((bucket, own, reduce_scatter_flat(own, gradient, group=self.slices.group, async_op=True)))

    def _land(self) -> None:
        """Wait for the oldest bucket, free it, and add its slice to the pieces' gradients."""
        bucket, own, work = self._flying.pop(0)
        work.wait()
        del self._gradients[bucket]
        own = own.to(bucket.flat.dtype)
        for slot, piece in enumerate(bucket.pieces):
            mean = bucket.piece_of(own, slot, self.slices.rank)
            piece.grad = mean if piece.grad is None else piece.grad.add_(mean)

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of the backward: send what had no gradient on this rank, and wait for everything."""
        while self._next < len(self.slices.buckets):
            self._send_next()
        while self._flying:
            self._land()
        self._runs = False
