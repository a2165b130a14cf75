"""Ways to reduce gradients: accumulation, replicas (HSDP), reduction dtypes and divide factors.

backward    | unit 3 |  unit 2       |  unit 1             |  end
unit 3               reduce-scatter ─▶ all-reduce (HSDP) ──▶ .grad
unit 2                                reduce-scatter ──────▶ all-reduce ▶ .grad
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .core import REDUCE_SCATTER, FSDPUnit, Reductions
from .internals import call_accumulate_hooks
from .layout import Piece


def averaging(
    ranks: int, dtype: torch.dtype, device: torch.device, factor: float | None, only_sums: bool
) -> tuple[Any, float, float]:
    """Choose how a reduction becomes a mean: by the collective itself, or by divisions around a sum.

    Args:
        ranks: number of ranks to combine.
        dtype: of the reduction.
        device: on a CPU we divide, since the mean of older versions of gloo is a sum.
        factor: divides instead of ``ranks``.
        only_sums: never leave the division to the collective.

    Returns:
        ``ReduceOp``, divisor of the input, divisor of the output.
    """
    wide = dtype in (torch.float32, torch.bfloat16)
    if wide and device.type != "cpu" and factor is None and not only_sums and ranks > 1:
        return dist.ReduceOp.AVG, 1.0, 1.0
    factor = float(ranks) if factor is None else factor
    before = 1.0
    if not wide:
        # float16 overflows at 65504: the sum is kept as far from it as its parts are from underflow.
        while factor % before == 0 and factor / before > before:
            before *= 2
    return dist.ReduceOp.SUM, before, factor / before


class GradientUnit(FSDPUnit):
    """A unit with options for its reduction."""

    mp_policy: Any
    """``MixedPrecisionPolicy``."""
    reduces = True
    all_reduces = True
    """HSDP only: all-reduce over the replicas after the reduce-scatter."""
    reduces_unused = False
    """Parameters without a gradient take part with zeros, except in units that have never run."""
    divide_by: float | None = None
    """Instead of the number of ranks."""
    only_sums = False
    ahead = 1
    """``BoundedReductions.ahead`` is the largest of all units'."""
    hook: Callable[[Tensor], None] | None = None
    """Called with this rank's reduced gradients, flat."""
    _partial: Tensor | None = None
    """Sum over the shards' ranks of earlier micro-batches, not yet all-reduced."""
    _accumulated: dict[int, Tensor]
    """Whole gradients of earlier micro-batches in ``reduce_dtype``."""

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Ranks with the same shard; None if the mesh has one axis."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @torch.no_grad()
    def take_gradients(self) -> dict[int, Tensor]:
        """Remove whole gradients for a reduction, or accumulate them without one."""
        taken: dict[int, Tensor] = {}
        dtype = self.mp_policy.reduce_dtype
        for index, param in enumerate(self.params):
            grad = param.whole.grad if param.whole is not None else None
            if grad is not None and index in self._accumulated:
                self._accumulated[index] += grad
                grad = None
            elif grad is not None and not self.reduces:
                if dtype is None or grad.dtype == dtype:
                    continue  # autograd adds the next one to it
                self._accumulated[index], grad = grad.to(dtype), None
            if param.whole is not None:
                param.whole.grad = None
            if not self.reduces:
                continue
            total = self._accumulated.pop(index, grad)
            if total is not None:
                taken[index] = total
            elif self.reduces_unused and param.whole is not None and param.whole.requires_grad:
                taken[index] = self.shard_S.new_zeros(
                    self.shapes[index], dtype=self.mp_policy.param_dtype or param.sharded.dtype
                )
        return taken

    @torch.no_grad()
    def reduce(self, grads: dict[int, Tensor]) -> Iterator[None]:
        """Average gradients over the ranks, and the replicas if there are any."""
        replicas, all_reduces = self.replicas, self.all_reduces
        indices = list(grads)
        dtype = self.mp_policy.reduce_dtype or grads[indices[0]].dtype
        ranks = self.ranks * (replicas.size() if replicas is not None else 1)
        op, before, after = averaging(ranks, dtype, self.shard_S.device, self.divide_by, self.only_sums)
        flat_RS, pieces = self.flatten(grads, dtype)
        if before != 1:
            flat_RS.div_(before)
        if self.ranks == 1:
            reduced_S = flat_RS.view(-1)
            del flat_RS
        else:
            reduced_S = flat_RS.new_empty(flat_RS.shape[1])
            work = getattr(dist, REDUCE_SCATTER)(reduced_S, flat_RS.view(-1), op=op, group=self.group, async_op=True)
            del flat_RS  # the work keeps it as long as it reads it; gloo's has a copy
            try:
                yield
            finally:
                work.wait()
        if replicas is not None:
            if self._partial is not None:
                reduced_S += self._partial
                self._partial = None
            if not all_reduces:
                self._partial = reduced_S
                return
            work = dist.all_reduce(reduced_S, op=op, group=replicas, async_op=True)
            try:
                yield
            finally:
                work.wait()
        if self.hook is not None:
            self.hook(reduced_S)
        if after != 1:
            reduced_S.div_(after)
        self.store(indices, pieces, reduced_S.to(self.params[indices[0]].sharded.dtype))

    def store(self, indices: list[int], pieces: list[Piece], reduced_S: Tensor) -> None:
        """Call the hooks of accumulated gradients."""
        super().store(indices, pieces, reduced_S)
        for index in indices:
            call_accumulate_hooks(self.params[index].sharded)

    def forget_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self._partial = None
        self._accumulated.clear()
        for param in self.params:
            if param.whole is not None:
                param.whole.grad = None


class BoundedReductions(Reductions):
    """Reductions of which ``ahead`` may wait for their first collective; each keeps a unit's gradients in memory."""

    ahead = 1

    def advance(self, *begun: Iterator[None]) -> None:
        """Resume all but the newest, so that one more may start."""
        before = len(self.in_flight)
        waiting = range(max(0, before - self.ahead + 1), before)
        self.in_flight = [
            each
            for number, each in enumerate((*self.in_flight, *begun))
            if number in waiting or next(each, "complete") is None
        ]

    def forget(self) -> None:
        """Drop all, once no collective reads or writes their memory any more."""
        for each in self.in_flight:
            each.close()  # type: ignore[attr-defined]
        self.in_flight = []
