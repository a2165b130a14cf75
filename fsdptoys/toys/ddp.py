"""DDP: gradients are averaged over ranks while the backward still computes others.

    rank 0   batch 0 → forward → backward ─┐                    ┌→ the same averages → same update
                                           ├─ all-reduce (mean) ┤
    rank 1   batch 1 → forward → backward ─┘                    └→ the same averages → same update

All ranks start from rank 0's parameters and apply the same averages, so they stay equal without
sending parameters again. The all-reduce takes as long as much of the backward; DDP hides one behind
the other:

    backward    ··· g9 g8 g7 ··· g6 g5 ··· g4 g3 g2 g1 ┐
    network               └ bucket 0 ─┘└ bucket 1 ──┘└─┴ bucket 2 ┐ gradients become the averages

1. A hook fires when a parameter's gradient is accumulated. The gradient is divided by N and copied
   into its bucket.
2. A full bucket is all-reduced asynchronously, in the fixed order of buckets: all ranks must issue
   the same collectives in the same order, whichever bucket is full first.
3. After the last bucket has left, autograd is asked for a callback at the end of the backward. It
   waits for all buckets and hands out the averages.
4. The first step has one bucket for each dtype, and records the order of gradients. Before the
   second, buckets are built in that order (rank 0's), so that each is full as early as possible.

Each rank keeps P parameters, P gradients, P in buckets (none where gradients are views of them) and
all optimizer states. It sends 2·P·(N−1)/N a step in ⌈P / bucket⌉ ring all-reduces.

Every trainable parameter needs one gradient in every backward. Left out: unused parameters, static
graphs, sparse gradients, communication hooks, uneven inputs.
Source: arXiv:2006.15704
"""

import functools
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd import queue_callback
from .buckets import assign_buckets, broadcast_tensors, views_like

MIB = 2**20
BUCKET_CAP_MB = 25


class Bucket:
    """Gradients of some parameters, in one flat buffer."""

    def __init__(self, numbers: list[int], params: list[nn.Parameter]) -> None:
        self.numbers = numbers
        self.params = params
        elements = sum(param.numel() for param in params)
        self.buffer = torch.zeros(elements, dtype=params[0].dtype, device=params[0].device)
        self.views = views_like(self.buffer, params)
        self.pending = 0
        """Gradients still to come in this backward."""
        self.sending: tuple[Tensor, Any] | None = None
        """The tensor in flight, and its work."""

    def fill(self, slot: int, divisor: float, as_views: bool) -> None:
        """Copy a parameter's gradient into the buffer, or zeros if there is none.

        Args:
            slot: index of the parameter in the bucket.
            divisor: divides the gradient.
            as_views: whether the gradient becomes a view of the buffer.
        """
        param = self.params[slot]
        view = self.views[slot]
        if param.grad is None:
            view.zero_()
        elif self._holds(slot):
            view.div_(divisor)
        else:
            # As PyTorch: a product with 1/N differs in the last bit from a division by N = 3.
            torch.mul(param.grad.detach(), 1.0 / divisor, out=view)
            if as_views:
                param.grad = view

    def hand_out(self, slot: int, as_views: bool) -> None:
        """Set a parameter's gradient to the buffer's values."""
        param = self.params[slot]
        view = self.views[slot]
        if as_views:
            if not self._holds(slot):
                param.grad = view
        elif param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)

    def _holds(self, slot: int) -> bool:
        grad = self.params[slot].grad
        view = self.views[slot]
        if grad is None:
            return False
        return grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


class Reducer:
    """Averages gradients over the ranks of a group, in each backward that is expected.

    Args:
        params: trainable parameters, each once, in the order of the forward.
        group: ranks to average over.
        bucket_bytes: bytes that fill a bucket.
        as_views: whether gradients become views of the buckets instead of copies.
        reduce_dtype: dtype of the sums; None for the gradients'.
        overlap: send buckets during the backward, rather than after it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        *,
        as_views: bool,
        reduce_dtype: torch.dtype | None,
        overlap: bool,
    ) -> None:
        self.params = params
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.as_views = as_views
        self.reduce_dtype = reduce_dtype
        self.overlap = overlap
        self.divisor = group.size()
        self.order: dict[int, None] = {}
        """Parameter numbers in the order of this backward's gradients."""
        self.has_rebuilt = False
        self.expects_backward = False
        self.has_started = False
        self._set_buckets(range(len(params)), sys.maxsize)
        # A parameter refers to its accumulator weakly; the hook lives as long as this list.
        self._accumulators = [
            torch.autograd.graph.get_gradient_edge(param).node for param in params
        ]
        on_gradient = weakref.WeakMethod(self.on_gradient)
        for number, accumulator in enumerate(self._accumulators):
            accumulator.register_hook(functools.partial(_call, on_gradient, number))

    def _set_buckets(self, order: Sequence[int], limit: int) -> None:
        """Allocate buckets for parameters in the given order."""
        params = [self.params[number] for number in order]
        self.buckets = [
            Bucket([order[index] for index in indices], [params[index] for index in indices])
            for indices in assign_buckets(params, limit)
        ]
        self._slots = {
            number: (bucket, slot)
            for bucket in self.buckets
            for slot, number in enumerate(bucket.numbers)
        }

    @torch.no_grad()
    def begin_forward(self) -> None:
        """Rebuild the buckets after the first step.

        Raises:
            RuntimeError: if the backward before left a bucket incomplete.
        """
        if self.has_started:
            raise RuntimeError(
                "a parameter got no gradient in the last backward, so its bucket was never reduced"
            )
        if not self.order or self.has_rebuilt:
            return
        order = torch.tensor(list(self.order), device=self.params[0].device)
        dist.broadcast(order, group=self.group, group_src=0)
        self.has_rebuilt = True
        self._set_buckets(order.tolist(), self.bucket_bytes)
        for bucket in self.buckets if self.as_views else []:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is not None:
                    param.grad = view.copy_(param.grad)

    def expect_backward(self) -> None:
        """Reduce gradients in the next backward."""
        self.expects_backward = True
        self.has_started = False
        self.order = {}
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.numbers)

    @torch.no_grad()
    def on_gradient(self, number: int) -> None:
        """Take a parameter's gradient, once autograd has accumulated it; send full buckets."""
        if not self.expects_backward:
            return
        if number in self.order:
            raise RuntimeError(
                "a parameter got two gradients in one backward, as by reentrant checkpoints that "
                "share it; set use_reentrant=False"
            )
        self.has_started = True
        self.order[number] = None
        bucket, slot = self._slots[number]
        bucket.fill(slot, self.divisor if self.reduce_dtype is None else 1, self.as_views)
        bucket.pending -= 1
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].pending == 0:
            if self.overlap:
                self.all_reduce(self.buckets[self.next_bucket])
            self.next_bucket += 1
        if self.next_bucket == len(self.buckets):
            queue_callback(self._finish)

    def all_reduce(self, bucket: Bucket) -> None:
        """Send a bucket."""
        sums = bucket.buffer.to(self.reduce_dtype or bucket.buffer.dtype)
        bucket.sending = sums, dist.all_reduce(sums, group=self.group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        """End the backward: wait for all buckets and hand out the averages."""
        self.expects_backward = False
        self.has_started = False
        for bucket in self.buckets if not self.overlap else []:
            self.all_reduce(bucket)
        for bucket in self.buckets:
            assert bucket.sending is not None
            sums, work = bucket.sending
            bucket.sending = None
            work.wait()
            if self.reduce_dtype is not None:
                bucket.buffer.copy_(sums.div_(self.divisor))
            for slot in range(len(bucket.params)):
                bucket.hand_out(slot, self.as_views)


class DDP(nn.Module):
    """A module with gradients that are averaged over ranks.

    Args:
        module: the same architecture on all ranks; rank 0's parameters and buffers are used.
        process_group: ranks to average over; None for all.
        bucket_cap_mb: MiB of a bucket.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves P bytes.
        broadcast_buffers: send rank 0's buffers (running statistics, say) before a forward, except
            after one without reduction.
        ignored_params: parameters to leave as they are.
        reduce_dtype: dtype of the sums over ranks; None for the parameters'.
        overlap: send gradients during the backward; otherwise after it, to measure the gain.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        ignored_params: Collection[nn.Parameter] = (),
        reduce_dtype: torch.dtype | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        group: Any = process_group or dist.group.WORLD
        self.process_group = group
        params = [param for param in module.parameters() if param not in set(ignored_params)]
        broadcast_tensors([*params, *module.buffers()], 0, group)
        self.reducer = Reducer(
            [param for param in params if param.requires_grad],
            group,
            int(bucket_cap_mb * MIB),
            as_views=gradient_as_bucket_view,
            reduce_dtype=reduce_dtype,
            overlap=overlap,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare to reduce in its backward."""
        trains = torch.is_grad_enabled()
        if trains:
            self.reducer.begin_forward()
        if self.broadcast_buffers and self.require_forward_param_sync:
            broadcast_tensors(list(self.module.buffers()), 0, self.process_group)
        output = self.module(*inputs, **kwargs)
        self.require_forward_param_sync = trains and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self.reducer.expect_backward()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of forwards in this context; the first backward after it reduces."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _call(method: "weakref.WeakMethod[Any]", number: int, *_: object) -> None:
    """Call a method of an object that may be gone; a strong reference would keep it alive."""
    bound = method()
    if bound is not None:
        bound(number)
