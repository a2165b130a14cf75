"""The heart of DDP: averages gradients over ranks while the backward still makes others.

    backward    ··· g9 g8 g7 ··· g6 g5 ··· g4 g3 g2 g1 ┐
    network               └ bucket 0 ─┘└ bucket 1 ──┘└─┴ bucket 2 ┐ finish: gradients become the averages

1. A hook on every parameter hears of its gradient, which is divided by N and copied into its bucket's buffer.
2. A bucket with all its gradients is all-reduced asynchronously. Buckets go in their fixed order, whichever is full
   first: collectives must be issued in the same order on all ranks.
3. After the last bucket has started, autograd is asked for a call at the end of the backward, which waits for all of
   them and hands out the averages.
4. In the first step everything is one bucket, and the order of the gradients is noted. From the second step on, buckets
   are cut in that order (rank 0's), so that each is complete as early as can be.

A parameter that the loss does not use gets no gradient, and its bucket would never be complete. With
``find_unused`` the graph of the outputs is searched for such parameters before every backward; they count as ready at
the first gradient of others. Which parameters any rank has used is all-reduced too (one int a parameter): those that
none has keep the gradient that they had.

A static graph needs no search: in the first step gradients are counted, and reduced only after the backward. The counts
say how often a parameter's hook runs before it is done, which is more than once where a reentrant checkpoint shares it.

Bytes a step and rank, P of gradients: 2·P·(N−1)/N, as a ring all-reduces, from ⌈P / bucket⌉ collectives.
Left out: averaging in a number format of its own (a communication hook does that).
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd_graph import queue_callback, reached_leaves
from .buckets import Bucket, GradBucket, assign_buckets
from .ddp_checks import ready_twice, unfinished_reduction
from .ddp_logging import Logbook

CommHook = Callable[[Any, Any], Any]


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group, once a backward that it is told to expect.

    Args:
        names: of the parameters, for messages.
        params: that require gradients, each once, in the order of the forward.
        sparse: for each of them, whether its gradient is a sparse tensor.
        group: over whose ranks gradients are averaged.
        limits: bytes of the first bucket, and of the others.
        first_limits: the same for the first step, before the order of gradients is known.
        find_unused: search the graph for parameters without gradient.
        as_views: let gradients be views of the buckets, instead of copies.
        static_graph: the graph is the same in every step.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        limits: Sequence[int],
        first_limits: Sequence[int],
        *,
        find_unused: bool,
        as_views: bool,
        static_graph: bool,
    ) -> None:
        self.names, self.params, self.sparse, self.group = names, params, sparse, group
        self.limits, self.first_limits = limits, first_limits
        self.find_unused, self.as_views = find_unused, as_views
        self.divisor = self.world_size = group.size()
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.iterations, self.has_rebuilt, self.error = 0, False, ""
        self.logbook = Logbook()
        self.ready_order: list[int] = []
        """In which the gradients of the last backward came."""
        self._expects_backward = self._has_started = self._awaits_end = False
        self._order: dict[int, None] = {}
        self._counted: list[int] = []
        self.unused: list[int] = []
        self._used: set[int] = set()
        self._times_ready: Counter[int] = Counter()
        self.set_static_graph(static_graph)
        # A parameter knows its accumulator only weakly: it must be held here, or the hook would go with it.
        self._accumulators = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        hear = weakref.WeakMethod(self._hear)
        self._handles = [
            accumulator.register_hook(functools.partial(_call, hear, number))
            for number, accumulator in enumerate(self._accumulators)
        ]

    def set_static_graph(self, static_graph: bool) -> None:
        """Say whether the graph is the same in every step, before the first."""
        self.static_graph = static_graph
        self.counts_first = static_graph
        """Whether gradients are still only counted, to be reduced after the backward."""
        searches = self.find_unused and not static_graph
        limits = self.limits if searches else self.first_limits
        self._make_buckets(assign_buckets(self.params, limits, self.sparse)[::-1])
        self.first_sizes = [bucket.nbytes for bucket in self.buckets]

    def begin_forward(self) -> None:
        """Refuse to go on from a backward that did not reduce everything; after the first step, cut new buckets."""
        self.logbook.begin(self.iterations)
        if self._has_started:
            missing = [number for number in range(len(self.params)) if number not in self._order]
            names = {number: self.names[number] for number in missing}
            self.fail(RuntimeError, unfinished_reduction(names, self.group.rank(), self.static_graph))
        if self._order and not self.has_rebuilt and (self.static_graph or not self.find_unused):
            self._rebuild()

    def expect_backward(self, outputs: Iterable[Tensor]) -> None:
        """Reduce in the next backward.

        Args:
            outputs: whatever the loss may be computed from; searched where unused parameters are to be found.
        """
        self._expects_backward = True
        self._has_started = self._awaits_end = False
        self._next_bucket = 0
        self._order, self._counted = {}, []
        for bucket in self.buckets:
            bucket.pending = len(bucket.numbers)
        self._times_left = Counter(self._times_ready)
        if self.find_unused and not self.static_graph:
            with torch.profiler.record_function("search_unused_parameters"):
                reached = reached_leaves(outputs)
            self.unused = [number for number, param in enumerate(self.params) if param not in reached]
        self.iterations += 1

    def enter_backward(self) -> None:
        """Told by the output's sink that its backward begins."""
        if self.counts_first and self._expects_backward and not self._awaits_end:
            self._awaits_end = True
            queue_callback(self._reduce_counted)

    @torch.no_grad()
    def _reduce_counted(self) -> None:
        """End the first step of a static graph: what was counted is what to wait for from now on."""
        self.counts_first = False
        self._times_ready = Counter(self._counted)
        self.unused = [number for number in range(len(self.params)) if number not in self._times_ready]
        for number in [*self._times_ready, *self.unused]:
            self._mark_ready(number)
        self._order = {}  # that of a backward is known after the next one only
        self._finish()

    def shadow(self) -> None:
        """Take part in the collectives of a backward of the other ranks, with gradients of zero."""
        for index, bucket in enumerate(self.buckets):
            bucket.buffer.zero_()
            self._all_reduce(index)
        for bucket in self.buckets:
            self._wait(bucket)
        if self.find_unused or self.static_graph:
            dist.all_reduce(self._used_map(), group=self.group)
        self._order = self._order or dict.fromkeys(range(len(self.params)))

    def fail(self, kind: type[Exception], message: str) -> NoReturn:
        """Raise, and remember why."""
        self.error = f"{kind.__name__}: {message}"
        raise kind(message)

    def remove_hooks(self) -> None:
        """Hear of no gradient any more."""
        for handle in self._handles:
            handle.remove()

    def _make_buckets(self, assignment: list[list[int]]) -> None:
        self.buckets = [
            Bucket(numbers, [self.params[number] for number in numbers], self.sparse[numbers[0]])
            for numbers in assignment
        ]
        self._slots = {number: (bucket, slot) for bucket in self.buckets for slot, number in enumerate(bucket.numbers)}

    @torch.no_grad()
    def _rebuild(self) -> None:
        """Cut buckets in the order in which rank 0's gradients came, parameters without any last."""
        came = [number for number in self._order if number not in self.unused]
        order = torch.tensor([*came, *self.unused], device=self.params[0].device)
        dist.broadcast(order, group=self.group, group_src=0)
        numbers: list[int] = order.tolist()
        assignment = assign_buckets(
            [self.params[number] for number in numbers], self.limits, [self.sparse[number] for number in numbers]
        )
        self._make_buckets([[numbers[place] for place in places] for places in assignment])
        self.has_rebuilt = True
        for bucket in self.buckets if self.as_views else []:
            for slot, param in enumerate(bucket.params):
                if param.grad is not None and not bucket.is_sparse:
                    param.grad = bucket.views[slot].copy_(param.grad)

    @torch.no_grad()
    def _hear(self, number: int) -> None:
        """Called by autograd when it is done with a parameter, whether that got a gradient or not."""
        if self.params[number].grad is not None:
            self._used.add(number)  # also where nothing is reduced: what adds up counts as used when it is
        if not self._expects_backward:
            return
        if self.counts_first:
            self._counted.append(number)
            return
        self._times_left[number] -= 1
        if self._times_left[number] > 0:
            return
        if not self._has_started:
            self._has_started = True
            self.logbook.note("backward_start")
            for unused in self.unused:
                self._mark_ready(unused)
        self._mark_ready(number)
        if self._next_bucket == len(self.buckets):
            queue_callback(self._finish)

    def _mark_ready(self, number: int) -> None:
        """Put a gradient into its bucket, and start what is complete."""
        if number in self._order:
            self.fail(RuntimeError, ready_twice(number, self.names[number], self.static_graph))
        self._order[number] = None
        bucket, slot = self._slots[number]
        bucket.fill(slot, self.divisor if self.comm_hook is None else 1, self.as_views)
        bucket.pending -= 1
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].pending == 0:
            self._all_reduce(self._next_bucket)
            self._next_bucket += 1
        if self._next_bucket == len(self.buckets) and (self.find_unused or self.static_graph):
            self._used_anywhere = self._used_map()
            self._used_work = dist.all_reduce(self._used_anywhere, group=self.group, async_op=True)

    def _all_reduce(self, index: int) -> None:
        self.logbook.note("comm_start")
        bucket = self.buckets[index]
        if self.comm_hook is None:
            bucket.result = dist.all_reduce(bucket.buffer, group=self.group, async_op=True).get_future()
            return
        hook, state = self.comm_hook
        bucket.result = hook(state, GradBucket(bucket, index, index == len(self.buckets) - 1))
        if not isinstance(bucket.result, torch.futures.Future.__bases__):  # those of PyTorch's works are of the base
            kind = type(bucket.result)
            self.fail(RuntimeError, f"callback must return a torch.futures.Future object, but got {kind}")

    def _wait(self, bucket: Bucket) -> None:
        """Have a bucket's buffer hold what came of its collective."""
        result = bucket.result.wait()
        if self.comm_hook is not None:
            result = result[0] if isinstance(result, (list, tuple)) else result
            if bucket.is_sparse:
                bucket.buffer = result
            elif result.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(result)
        bucket.result = None

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for all buckets and hand out the averages."""
        self.logbook.note("backward_end")
        self.ready_order = list(self._order)
        self._expects_backward = self._has_started = False
        used = set(range(len(self.params)))
        if self.find_unused or self.static_graph:
            self._used_work.wait()
            used = set(self._used_anywhere.nonzero().flatten().tolist())
        for bucket in self.buckets:
            self._wait(bucket)
            for slot, number in enumerate(bucket.numbers):
                if number in used:
                    bucket.hand_out(slot, self.as_views)
        self.logbook.note("comm_end")
        self._used.clear()

    def _used_map(self) -> Tensor:
        used = [int(number in self._used) for number in range(len(self.params))]
        return torch.tensor(used, dtype=torch.int32, device=self.params[0].device)


def _call(method: "weakref.WeakMethod[Any]", number: int, *_: object) -> None:
    """Call a method of an object that may be gone; autograd's graph would keep it alive otherwise."""
    bound = method()
    if bound is not None:
        bound(number)
