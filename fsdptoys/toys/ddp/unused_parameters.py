"""Parameters that do not get one gradient in every backward, for DDP.

The bucket of a parameter that the loss does not use would never be full. Two remedies:

- ``find_unused`` searches the graph of the outputs before every backward. The parameters that it does not reach count
  as ready at the first gradient of others. Ranks all-reduce the set of used parameters (one int each); a parameter that
  no rank has used keeps its earlier gradient.
- A static graph needs no search: the first step only counts gradients, and reduces after the backward. The counts are
  how often a parameter's hook fires before its gradient is complete: more than once where reentrant checkpoints share
  the parameter.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..autograd import queue_callback
from ..tensor_tree import map_tensors, tensors_in
from .checks import ready_twice, unfinished_reduction
from .core import Bucket, Reducer


class PartialReducer(Reducer):
    """A reducer for graphs in which parameters are unused, or used more than once; ``names`` are for messages."""

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        group: dist.ProcessGroup,
        limits: Sequence[int],
        first_limits: Sequence[int],
        *,
        as_views: bool,
        find_unused: bool,
        static_graph: bool,
    ) -> None:
        self.names, self.find_unused, self.error = list(names.values()), find_unused, ""
        self.world_size, self.iterations = group.size(), 0
        self.static_graph = self.counts_first = static_graph
        """``counts_first``: gradients are only counted, and reduced after the backward."""
        self._awaits_end = False
        self.unused: list[int] = []
        self.ready_order: list[int] = []
        """Parameter numbers in the order of the last backward's gradients."""
        self._used: set[int] = set()
        self._counted: list[int] = []
        self._times_ready: Counter[int] = Counter()
        super().__init__(list(names), group, limits, limits if self.searches else first_limits, as_views)

    def set_static_graph(self) -> None:
        """Declare before the first step that the graph is the same in every step; the first buckets stay."""
        self.static_graph = self.counts_first = True

    def fail(self, kind: type[Exception], message: str) -> NoReturn:
        """Raise an exception, and keep its message for the logging data."""
        self.error = f"{kind.__name__}: {message}"
        raise kind(message)

    @property
    def searches(self) -> bool:
        """Whether each forward searches the graph."""
        return self.find_unused and not self.static_graph

    @property
    def shares_used(self) -> bool:
        """Whether ranks exchange the set of used parameters."""
        return self.find_unused or self.static_graph

    def begin_forward(self) -> None:
        """Rebuild the buckets after the first step, parameters without gradient last."""
        if self.has_started:
            missing = {number: name for number, name in enumerate(self.names) if number not in self.order}
            self.fail(RuntimeError, unfinished_reduction(missing, self.group.rank(), self.static_graph))
        if self.order and not self.has_rebuilt and not self.searches:
            self.rebuild([*(number for number in self.order if number not in self.unused), *self.unused])

    def expect_backward(self, output: Any) -> Any:
        """Search the graph; add a node to it where the begin of the backward matters."""
        super().expect_backward(output)
        self._awaits_end = False
        self._counted = []
        self._times_left = Counter(self._times_ready)
        self.iterations += 1
        if self.searches:
            with torch.profiler.record_function("search_unused_parameters"):
                reached = reached_leaves(tensors_in(output))
            self.unused = [number for number, param in enumerate(self.params) if param not in reached]
        return through_sink(output, self.enter_backward) if self.searches or self.counts_first else output

    def enter_backward(self) -> None:
        """Ask for a callback at the end of a static graph's first backward."""
        if self.counts_first and self.expects_backward and not self._awaits_end:
            self._awaits_end = True
            queue_callback(self._reduce_counted)

    @torch.no_grad()
    def on_gradient(self, number: int) -> None:
        """Count a gradient; take it if it is complete, and with the first one all unused parameters."""
        if self.params[number].grad is not None:
            self._used.add(number)  # also without reduction: accumulated gradients count when they are reduced
        if not self.expects_backward:
            return
        if self.counts_first:
            self._counted.append(number)
            return
        self._times_left[number] -= 1
        if self._times_left[number] > 0:
            return
        if not self.has_started:
            self.start_backward()
        super().on_gradient(number)

    def start_backward(self) -> None:
        """Mark the unused parameters as ready; called with the first gradient."""
        self.has_started = True
        for unused in self.unused:
            self.mark_ready(unused)

    def mark_ready(self, number: int) -> None:
        """Refuse a second gradient; after the last one, exchange the set of used parameters."""
        if number in self.order:
            self.fail(RuntimeError, ready_twice(number, self.names[number], self.static_graph))
        super().mark_ready(number)
        if self.next_bucket == len(self.buckets) and self.overlaps:
            self.share_used()

    def share_used(self) -> None:
        """Begin to exchange the set of used parameters."""
        if self.shares_used:
            self._used_anywhere = self._used_map()
            self._used_work = dist.all_reduce(self._used_anywhere, group=self.group, async_op=True)

    def send_all(self) -> None:
        """Exchange the set as well."""
        super().send_all()
        self.share_used()

    @torch.no_grad()
    def _reduce_counted(self) -> None:
        """End the first step of a static graph."""
        self.counts_first = False
        self._times_ready = Counter(self._counted)
        self.unused = [number for number in range(len(self.params)) if number not in self._times_ready]
        for number in [*self._times_ready, *self.unused]:
            self.mark_ready(number)
        self.order = {}  # the next backward has the order of a backward
        self.end_backward()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the set of used parameters as well."""
        self.ready_order = list(self.order)
        self._reduced = set(range(len(self.params)))
        if self.shares_used:
            self._used_work.wait()
            self._reduced = set(self._used_anywhere.nonzero().flatten().tolist())
        super().finish()
        self._used.clear()

    def hand_out(self, bucket: Bucket) -> None:
        """Leave the gradients of parameters that no rank has used."""
        for slot, number in enumerate(bucket.numbers):
            if number in self._reduced:
                bucket.hand_out(slot, self.as_views)

    def shadow(self) -> None:
        """Take part in the collectives of the other ranks' backward, with gradients of zero."""
        for index, bucket in enumerate(self.buckets):
            bucket.buffer.zero_()
            self.all_reduce(index)
        for bucket in self.buckets:
            self.wait(bucket)
        if self.shares_used:
            dist.all_reduce(self._used_map(), group=self.group)
        self.order = self.order or dict.fromkeys(range(len(self.params)))

    def _used_map(self) -> Tensor:
        used = [int(number in self._used) for number in range(len(self.params))]
        return torch.tensor(used, dtype=torch.int32, device=self.params[0].device)


def reached_leaves(outputs: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves of autograd's graph that a backward from ``outputs`` would reach."""
    outputs = list(outputs)
    leaves = {output for output in outputs if output.is_leaf and output.requires_grad}
    seen: set[Any] = {output.grad_fn for output in outputs if output.grad_fn is not None}
    frontier = list(seen)
    while frontier:
        node = frontier.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(node.variable)
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        frontier += following
    return leaves


class Sink(torch.autograd.Function):
    """Passes all tensors of an output through one node, which calls a method when the backward enters it.

    Outputs that the loss does not use get an undefined gradient instead of no visit, so that hooks of parameters that
    only they depend on run too.
    """

    @staticmethod
    def forward(
        ctx: Any, on_backward: "weakref.WeakMethod[Callable[[], None]]", *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Clone the outputs, since views of a function's output cannot be changed in place."""
        ctx.set_materialize_grads(False)
        ctx.on_backward = on_backward
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients unchanged."""
        bound = ctx.on_backward()
        if bound is not None:
            bound()
        return None, *grads


def through_sink(output: Any, on_backward: Callable[[], None]) -> Any:
    """Pass an output's tensors with gradient through one :class:`Sink`, which refers weakly to the method."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    passed = iter(Sink.apply(weakref.WeakMethod(on_backward), *tensors))
    return map_tensors(output, lambda tensor: tensor if tensor.grad_fn is None else next(passed))
