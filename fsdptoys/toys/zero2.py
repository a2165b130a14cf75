"""ZeRO-2: gradients are reduced to the rank that needs them, and no rank keeps them whole.

                 rank 0                             rank 1
    backward     bucket of gradients ─ reduce-scatter ─ bucket of gradients     freed on arrival
                 slice 0 of their mean                  slice 1 of their mean   gradients: 1/N
    step         update slice 0                         update slice 1          states: 1/N
    publish      slices 0 and 1 ←──── all-gather ────→  slices 0 and 1

An all-reduce is a reduce-scatter and an all-gather of its result. ZeRO-1's ranks need only a slice
of that result; here the second half is left out, which pays for the all-gather of parameters: as
many bytes as DDP, with 1/N of states and gradients.

A bucket's buffer is allocated at its first gradient, takes over each gradient (which is freed), is
sent after the last one and freed on arrival; at most two are in flight. Buckets leave in a fixed
order, as in DDP. At the end of the backward, a parameter that a rank's loss does not use counts as
zeros.

Every backward reduces, and the slices accumulate the gradients of several micro-batches.
Accumulating whole gradients and reducing once would send less, but needs P of memory again.

Each rank keeps P parameters, P/N gradients (plus three buckets) and 1/N of the states. It sends
P·(N−1)/N to reduce-scatter in each backward and P·(N−1)/N to all-gather in each step.

Left out: buckets in the order of the first backward (slices would have to move), reentrant backward
passes, None as the gradient of parameters that no rank uses (it is zero). The optimizer must work
element by element.
Source: arXiv:1910.02054 (P_os+g)
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd import queue_callback
from .buckets import broadcast_tensors
from .flat_slices import SlicedBucket, Slices, reduce_scatter_flat

IN_FLIGHT = 2
"""Buckets in flight at most; the oldest is waited for before another leaves."""


class Zero2(nn.Module):
    """A module whose gradients are reduced to slices; build the optimizer over ``pieces()`` and
    ``attach`` it.

    Args:
        module: the same architecture on all ranks; rank 0's values are used.
        process_group: ranks to shard over; None for all.
        bucket_cap_mb: MiB of a bucket.
        reduce_dtype: dtype of the sums over ranks; None for the parameters'.
        overlap: send buckets during the backward; otherwise after it, which keeps all gradients
            whole until then.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.reduce_dtype = reduce_dtype
        self.overlap = overlap
        group: Any = process_group or dist.group.WORLD
        broadcast_tensors([*module.parameters(), *module.buffers()], 0, group)
        self.slices = Slices(module, group, int(bucket_cap_mb * 2**20))
        self._gradients: dict[SlicedBucket, Tensor] = {}
        self._in_flight: list[tuple[SlicedBucket, Tensor, Any]] = []
        self._in_backward = False
        for param in self.slices.places:
            param.register_post_accumulate_grad_hook(self._take)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def pieces(self) -> Iterator[nn.Parameter]:
        """Yield the parameters for an optimizer of this rank."""
        return self.slices.pieces()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the updates after each step of an optimizer."""
        optimizer.register_step_post_hook(lambda *_: self.slices.publish())

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Move a gradient into its bucket; send the next buckets in order if they are full."""
        if not self._in_backward:
            self._in_backward = True
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
        while (
            self.overlap and self._next < len(buckets) and self._pending[buckets[self._next]] == 0
        ):
            self._send_next()

    def _gradient(self, bucket: SlicedBucket) -> Tensor:
        if bucket not in self._gradients:
            self._gradients[bucket] = torch.zeros_like(bucket.flat, dtype=self.reduce_dtype)
        return self._gradients[bucket]

    def _send_next(self) -> None:
        bucket = self.slices.buckets[self._next]
        self._next += 1
        while len(self._in_flight) >= IN_FLIGHT:
            self._receive()
        gradient = self._gradient(bucket)
        own = gradient.new_empty(bucket.slice_length)
        work = reduce_scatter_flat(own, gradient, group=self.slices.group, async_op=True)
        self._in_flight.append((bucket, own, work))

    def _receive(self) -> None:
        """Wait for the oldest bucket, free it, and add its slice to the pieces' gradients."""
        bucket, own, work = self._in_flight.pop(0)
        work.wait()
        del self._gradients[bucket]
        own = own.to(bucket.flat.dtype)
        for slot, piece in enumerate(bucket.pieces):
            mean = bucket.piece_of(own, slot, self.slices.rank)
            piece.grad = mean if piece.grad is None else piece.grad.add_(mean)

    @torch.no_grad()
    def _finish(self) -> None:
        """End the backward: send the remaining buckets, and wait for all."""
        while self._next < len(self.slices.buckets):
            self._send_next()
        while self._in_flight:
            self._receive()
        self._in_backward = False
