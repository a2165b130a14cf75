"""The core of DDP: gradients are averaged over ranks while the backward still computes others.

    rank 0   batch 0 → forward → backward ─┐                    ┌→ the same averages → the same update
                                           ├─ all-reduce (mean) ┤
    rank 1   batch 1 → forward → backward ─┘                    └→ the same averages → the same update

All ranks start from rank 0's parameters and apply the same averages, so they stay equal without sending parameters
again. The all-reduce takes as long as much of the backward; DDP hides one behind the other:

    backward    ··· g9 g8 g7 ··· g6 g5 ··· g4 g3 g2 g1 ┐
    network               └ bucket 0 ─┘└ bucket 1 ──┘└─┴ bucket 2 ┐ finish: gradients become the averages

1. A hook fires when a parameter's gradient is accumulated; the gradient is divided by N and copied into its bucket.
2. A full bucket is all-reduced asynchronously, in the fixed order of buckets: all ranks must issue the same collectives
   in the same order, whichever bucket is full first.
3. After the last bucket has left, autograd is asked for a callback at the end of the backward. It waits for all buckets
   and hands out the averages.
4. The first step records the order of gradients. Before the second, buckets are rebuilt in that order (rank 0's), so
   that each is full as early as possible.

Each rank keeps P parameters, P gradients, P in buckets (none where gradients are views of them) and all optimizer
states. It sends 2·P·(N−1)/N a step in ⌈P / bucket⌉ ring all-reduces.

Here every trainable parameter needs a gradient in every backward. ``module`` extends these classes by subclasses:
unused parameters, static graphs, sparse gradients, communication hooks, uneven inputs, PyTorch's checks and messages.
Source: arXiv:2006.15704
"""

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..autograd import queue_callback
from ..buckets import assign_buckets, broadcast_tensors, views_like

MIB = 2**20
BUCKET_CAP_MB = 25


class Bucket:
    """Gradients of some parameters, in one flat buffer."""

    def __init__(self, numbers: list[int], params: list[nn.Parameter]) -> None:
        self.numbers, self.params = numbers, params
        self.buffer = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
        self.views = views_like(self.buffer, params)
        self.pending = 0
        """Gradients still to come in this backward."""
        self.result: Any = None
        """Future of the collective."""

    def fill(self, slot: int, divisor: float, as_views: bool) -> None:
        """Copy a parameter's gradient, divided by ``divisor``, into the buffer, or zeros if there is none.

        Args:
            slot: index of the parameter in the bucket.
            divisor: number of ranks to average over.
            as_views: whether the gradient becomes a view of the buffer.
        """
        param, view = self.params[slot], self.views[slot]
        if param.grad is None:
            view.zero_()
        elif self._holds(slot):
            view.div_(divisor)
        else:
            # As PyTorch: a product with 1/N differs in the last bit from a division where N is no power of two.
            torch.mul(param.grad.detach(), 1.0 / divisor, out=view)
            if as_views:
                param.grad = view

    def hand_out(self, slot: int, as_views: bool) -> None:
        """Set a parameter's gradient to the buffer's values."""
        param, view = self.params[slot], self.views[slot]
        if as_views:
            if param.grad is None or not self._holds(slot):
                param.grad = view
        elif param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)

    def _holds(self, slot: int) -> bool:
        grad, view = self.params[slot].grad, self.views[slot]
        return grad is not None and grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


class Reducer:
    """Averages gradients over the ranks of a group, once in each backward that ``expect_backward`` announces.

    Args:
        params: trainable parameters, each once, in the order of the forward.
        group: ranks to average over.
        limits: bytes of the first bucket and of the others.
        first_limits: the same for the first step, before the order of gradients is known.
        as_views: whether gradients become views of the buckets instead of copies.
    """

    overlaps = True
    """Whether buckets leave during the backward, rather than after it."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        limits: Sequence[int],
        first_limits: Sequence[int],
        as_views: bool,
    ) -> None:
        self.params, self.group, self.limits, self.as_views = params, group, limits, as_views
        self.divisor = group.size()
        self.order: dict[int, None] = {}
        """Parameter numbers in the order of this backward's gradients."""
        self.has_rebuilt = self.expects_backward = self.has_started = False
        self.set_buckets(self.make_buckets(range(len(params)), first_limits)[::-1])
        # A parameter refers to its accumulator weakly; the hook lives as long as this list.
        self._accumulators = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        on_gradient = weakref.WeakMethod(self.on_gradient)
        self.handles = [
            accumulator.register_hook(functools.partial(_call, on_gradient, number))
            for number, accumulator in enumerate(self._accumulators)
        ]

    def make_buckets(self, numbers: Sequence[int], limits: Sequence[int]) -> list[Bucket]:
        """Allocate buckets for parameters in the given order."""
        params = [self.params[number] for number in numbers]
        return [
            Bucket([numbers[place] for place in places], [params[place] for place in places])
            for places in assign_buckets(params, limits)
        ]

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = buckets
        self._slots = {number: (bucket, slot) for bucket in buckets for slot, number in enumerate(bucket.numbers)}

    def begin_forward(self) -> None:
        """Rebuild the buckets after the first step.

        Raises:
            RuntimeError: if the backward before left a bucket incomplete.
        """
        if self.has_started:
            raise RuntimeError("a parameter got no gradient in the last backward, so its bucket was never reduced")
        if self.order and not self.has_rebuilt:
            self.rebuild(list(self.order))

    @torch.no_grad()
    def rebuild(self, numbers: list[int]) -> None:
        """Make buckets in the order of rank 0's gradients; ``numbers`` are this rank's."""
        order = torch.tensor(numbers, device=self.params[0].device)
        dist.broadcast(order, group=self.group, group_src=0)
        self.has_rebuilt = True
        self.set_buckets(self.make_buckets(order.tolist(), self.limits))
        for bucket in self.buckets if self.as_views else []:
            for param, view in zip(bucket.params, bucket.views, strict=False):
                if param.grad is not None:
                    param.grad = view.copy_(param.grad)

    def expect_backward(self, output: Any) -> Any:
        """Reduce gradients in the next backward, which starts from the forward's ``output``."""
        self.expects_backward, self.has_started = True, False
        self.order, self.next_bucket = {}, 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.numbers)
        return output

    @torch.no_grad()
    def on_gradient(self, number: int) -> None:
        """Take the gradient of a parameter; autograd calls this when it has accumulated it."""
        if not self.expects_backward:
            return
        self.has_started = True
        self.mark_ready(number)
        if self.next_bucket == len(self.buckets):
            queue_callback(self.end_backward)

    def mark_ready(self, number: int) -> None:
        """Put a gradient into its bucket; all-reduce the next buckets in order if they are full."""
        self.order[number] = None
        bucket, slot = self._slots[number]
        bucket.fill(slot, self.divisor, self.as_views)
        bucket.pending -= 1
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].pending == 0:
            if self.overlaps:
                self.all_reduce(self.next_bucket)
            self.next_bucket += 1

    def all_reduce(self, index: int) -> None:
        """Send a bucket."""
        bucket = self.buckets[index]
        bucket.result = dist.all_reduce(bucket.buffer, group=self.group, async_op=True).get_future()

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket's buffer holds the averages."""
        bucket.result.wait()
        bucket.result = None

    @torch.no_grad()
    def end_backward(self) -> None:
        """Send the buckets that the backward has not, and finish."""
        if not self.overlaps:
            self.send_all()
        self.finish()

    def send_all(self) -> None:
        """Send all buckets."""
        for index in range(len(self.buckets)):
            self.all_reduce(index)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all buckets and hand out the averages."""
        self.expects_backward = self.has_started = False
        for bucket in self.buckets:
            self.wait(bucket)
            self.hand_out(bucket)

    def hand_out(self, bucket: Bucket) -> None:
        """Set the gradients of a bucket's parameters to the averages."""
        for slot in range(len(bucket.params)):
            bucket.hand_out(slot, self.as_views)


class DDP(nn.Module):
    """A module whose gradients are averaged over ranks.

    Args:
        module: the same architecture on all ranks; rank 0's parameters and buffers are used.
        process_group: ranks to average over; None for all.
        bucket_cap_mb: MiB of a bucket.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves P bytes.
        overlap: send gradients during the backward; otherwise after it, to measure the gain of overlap.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        gradient_as_bucket_view: bool = False,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        group: Any = process_group or dist.group.WORLD
        self.process_group, self.require_backward_grad_sync = group, True
        limits = [int(bucket_cap_mb * MIB)]
        broadcast_tensors([*module.parameters(), *module.buffers()], 0, group)
        params = [param for param in module.parameters() if param.requires_grad]
        self.reducer = Reducer(params, group, limits, limits, gradient_as_bucket_view)
        self.reducer.overlaps = overlap

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare to reduce in its backward."""
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.before_forward()
        output = self.module(*inputs, **kwargs)
        return self.after_forward(output, reduces)

    def before_forward(self) -> None:
        """Rebuild buckets, and send rank 0's buffers (running statistics, say) to all ranks."""
        if torch.is_grad_enabled():
            self.reducer.begin_forward()
        broadcast_tensors(list(self.module.buffers()), 0, self.process_group)

    def after_forward(self, output: Any, reduces: bool) -> Any:
        """Announce the backward if it ``reduces``."""
        return self.reducer.expect_backward(output) if reduces else output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of forwards in this context without reducing; the first backward after it reduces."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _call(method: "weakref.WeakMethod[Any]", number: int, *_: object) -> None:
    """Call a method of an object that may be gone; a strong reference from autograd's graph would keep it alive."""
    bound = method()
    if bound is not None:
        bound(number)
