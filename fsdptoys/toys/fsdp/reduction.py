"""From whole gradients to sharded ones, beside the backward that goes on.

A reduction is a generator: it runs to where it must wait for a collective, and yields. The next unit's backward takes
it a step further, when that collective has had the time of a unit's computation:

    backward    | unit 3 |  unit 2       |  unit 1             |  end
    unit 3               reduce-scatter ─▶ all-reduce (HSDP) ──▶ .grad
    unit 2                                reduce-scatter ──────▶ all-reduce ▶ .grad
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .collectives import all_reduce, averaging, reduce_scatter
from .internals import accumulated, local_tensor
from .layout import lay_out
from .unit import Unit


class Gradients:
    """What becomes of the gradients of one unit.

    Args:
        unit: whose parameters they are of.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.reduces = True
        self.all_reduces = True
        """Only for HSDP: whether to go on over the replicas after the reduce-scatter."""
        self.reduces_unused = False
        """Whether parameters without a gradient take part with zeros."""
        self.divide_by: float | None = None
        """Instead of the number of ranks."""
        self.only_sums = False
        self.ahead = 1
        """For ``Reductions.ahead``, which is the largest of all units'."""
        self.hook: Callable[[Tensor], None] | None = None
        """Called with this rank's reduced gradients."""
        self._partial: Tensor | None = None
        """Sum over the shards' ranks of earlier micro-batches, not yet over the replicas."""

    @torch.no_grad()
    def take(self) -> dict[int, Tensor]:
        """Collect what autograd left, by index of the parameter, for a reduction; without one, keep it."""
        taken: dict[int, Tensor] = {}
        dtype = self.unit.mp_policy.reduce_dtype
        for index, param in enumerate(self.unit.params):
            grad = param.whole.grad if param.whole is not None else None
            if grad is not None and param.accumulated is not None:
                param.accumulated += grad
                grad = None
            elif grad is not None and not self.reduces:
                if dtype is None or grad.dtype == dtype:
                    continue  # autograd adds the next one to it
                param.accumulated, grad = grad.to(dtype), None
            if param.whole is not None:
                param.whole.grad = None
            if not self.reduces:
                continue
            total, param.accumulated = param.accumulated if param.accumulated is not None else grad, None
            if total is None and self.reduces_unused and param.sharded.requires_grad:
                kind = self.unit.mp_policy.param_dtype or param.sharded.dtype
                taken[index] = torch.zeros(self.unit.shard.shapes[index], dtype=kind, device=self.unit.device)
            elif total is not None:
                outer = self.unit.shard.outers[index]
                taken[index] = total if outer is None else outer.take_gradient(total)
        return taken

    @torch.no_grad()
    def reduce(self, taken: dict[int, Tensor]) -> Iterator[None]:
        """Make sharded gradients out of whole ones, which are freed at the first step; yields before each wait."""
        shard, replicas, all_reduces = self.unit.shard, self.unit.shard.replicas, self.all_reduces
        first = next(iter(taken.values()))
        dtype = self.unit.mp_policy.reduce_dtype or first.dtype
        ranks = shard.ranks * (replicas.size() if replicas is not None else 1)
        mean = averaging(ranks, dtype, first.device, self.divide_by, self.only_sums)
        indices = list(taken)
        pieces, numel = lay_out([shard.shapes[i] for i in indices], [shard.dims[i] for i in indices], shard.ranks)

        flat = torch.empty(shard.ranks * numel, dtype=dtype, device=first.device)
        del first
        for piece, index in zip(pieces, indices, strict=True):
            piece.write(taken.pop(index), flat.view(shard.ranks, -1))
        if mean.before != 1:
            flat.div_(mean.before)
        if shard.ranks == 1:
            reduced = flat
            del flat
        else:
            reduced = flat.new_empty(numel)
            work = reduce_scatter(reduced, flat, mean.op, shard.group)
            del flat  # the work keeps what it still reads, which of gloo's is a copy
            try:
                yield
            finally:
                work.wait()

        if replicas is not None:
            if self._partial is not None:
                reduced += self._partial
                self._partial = None
            if not all_reduces:
                self._partial = reduced
                return
            work = all_reduce(reduced, mean.op, replicas)
            try:
                yield
            finally:
                work.wait()
        if self.hook is not None:
            self.hook(reduced)
        if mean.after != 1:
            reduced.div_(mean.after)

        reduced = reduced.to(self.unit.params[indices[0]].sharded.dtype)
        for piece, index in zip(pieces, indices, strict=True):
            param = self.unit.params[index].sharded
            grad = piece.local_view(reduced, shard.rank)
            if param.grad is None:
                param.grad = shard.dtensor(index, grad)
            else:
                local_tensor(param.grad).add_(grad)
            accumulated(param)

    def forget(self) -> None:
        """Drop what was gathered up so far."""
        self._partial = None
        for param in self.unit.params:
            param.accumulated = None
            if param.whole is not None:
                param.whole.grad = None


_DONE = object()


class Reductions:
    """Those on their way, the oldest first."""

    def __init__(self) -> None:
        self.ahead = 1
        """How many may wait at a time for their first collective; each keeps a unit's gradients in memory."""
        self._on_their_way: list[Iterator[None]] = []

    def start(self, reduction: Iterator[None]) -> None:
        """Begin one."""
        if next(reduction, _DONE) is not _DONE:
            self._on_their_way.append(reduction)

    def advance(self) -> None:
        """Take a step in all but the newest, so that one more may begin."""
        ready = len(self._on_their_way) - (self.ahead - 1)
        self._on_their_way = [
            each for i, each in enumerate(self._on_their_way) if i >= ready or next(each, _DONE) is not _DONE
        ]

    def finish(self) -> None:
        """Have all gradients."""
        while self._on_their_way:
            self._on_their_way = [each for each in self._on_their_way if next(each, _DONE) is not _DONE]

    def forget(self) -> None:
        """Drop them, once no collective reads or writes their memory any more."""
        for each in self._on_their_way:
            each.close()  # type: ignore[attr-defined]
        self._on_their_way = []
