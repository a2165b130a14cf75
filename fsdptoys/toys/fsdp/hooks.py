"""Hooks for prefetching, recomputation, units of several modules, and mixed precision.

- Prefetching: the forward gathers the unit that came next in the last step, or the units that the
  user lists; the backward the one that ended its forward before, or a list. A wrong guess costs one
  all-gather.
- Recomputation needs no gathering of its own: a module's ``pre_backward`` has come before it.
- Several modules share a unit: the first to run gathers it, the last one reshards it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensor_tree import map_tensors
from .core import Iteration, UnitHooks
from .unit import FullUnit


def _leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable compilation of hooks inside compiled code.

    torch's own optimizers use ``_disable_dynamo``, which imports the compiler later; it is private
    in torch 2.7 to 2.13.
    """
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def in_backward() -> bool:
    """Return whether this thread runs a backward; a forward is a recomputation then."""
    return torch._C._current_graph_task_id() != -1


class FullIteration(Iteration):
    """A step's state with the order of forwards."""

    outermost: FullHooks | None = None
    """Outermost unit of the running forward."""
    latest: FullHooks | None = None
    """The unit that began last in it."""

    def end_backward(self) -> None:
        """End the forward as well if it is still open."""
        self.outermost = None
        super().end_backward()


class FullHooks(UnitHooks):
    """Hooks with all extensions.

    Args:
        modules, unit: as for ``UnitHooks``.
        is_auto: keep whole parameters after the forward if this becomes the root.
    """

    unit: FullUnit
    iteration: FullIteration

    def __init__(self, modules: Sequence[nn.Module], unit: FullUnit, is_auto: bool) -> None:
        super().__init__(modules, unit)
        self.iteration = FullIteration()
        self.is_auto = is_auto
        self.is_open = False
        """Whether the forward has begun and not ended."""
        self.recomputes = False
        """Whether forwards are recomputations: once the unit's backward has begun."""
        self.to_run: set[nn.Module] = set()
        """Of several modules, those with a forward still to come."""
        self.successor: FullHooks | None = None
        """The unit that came next in the last forward."""
        self.forward_prefetch: list[FullHooks] = []
        self.backward_prefetch: list[FullHooks] = []

    def become_root(self) -> None:
        """Keep whole parameters after the forward, since the root's backward comes next."""
        super().become_root()
        if self.is_auto:
            self.unit.reshards_after_forward = False

    @_leave_uncompiled
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole; begin to gather the next unit."""
        if len(self.modules) > 1 and not self.to_run:
            self.to_run.update(self.modules)
        is_first = not self.recomputes and not self.is_open
        if is_first:
            self._begin()
        dtype = self.unit.policy.param_dtype
        if self.unit.policy.cast_forward_inputs and dtype is not None:
            args, kwargs = map_tensors(
                (args, kwargs),
                lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
            )
        # Another module of the unit watches its inputs
        if self.recomputes or self.phase == "forward":
            self.unit.gather()
            self.unit.wait()
        else:
            args, kwargs = super().pre_forward(module, args, kwargs)
        if is_first:
            self._prefetch_forward()
        return args, kwargs

    def _begin(self) -> None:
        """Record the order of units."""
        if not self.iteration.hooks:
            self.become_root()
        self.is_open = True
        if in_backward():
            return
        if self.iteration.outermost is None:
            self.iteration.outermost = self
            self.iteration.latest = None
        if self.unit.params:
            if self.iteration.latest is not None:
                self.iteration.latest.successor = self
            self.iteration.latest = self

    def _prefetch_forward(self) -> None:
        for hooks in self.forward_prefetch:
            hooks.unit.gather()
        if not self.forward_prefetch and self.successor is not None and not in_backward():
            self.successor.unit.gather()

    @_leave_uncompiled
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after the last of the modules."""
        self.to_run.discard(module)
        if self.to_run or self.recomputes:
            return output
        super().post_forward(module, args, output)
        self.is_open = False
        if self.iteration.outermost is self:
            self.iteration.outermost = None
            for hooks in self.iteration.hooks:
                hooks.unit.end_gathering()  # a wrong guess
        return output

    def leave_forward(self) -> None:
        """Stay whole after a recomputation: its backward comes next."""
        if not in_backward():
            super().leave_forward()

    def pre_backward(self, grad: Tensor) -> Tensor:
        """Treat forwards as recomputations from now on; gather the listed units."""
        self.recomputes = True
        self.is_open = False
        super().pre_backward(grad)
        for hooks in self.backward_prefetch:
            if hooks.unit.gathers_in_backward:
                hooks.unit.gather()
        return grad

    def prefetch_backward(self) -> None:
        """Gather the unit that ended its forward before, if the user lists none."""
        if not self.backward_prefetch:
            super().prefetch_backward()

    def end_backward(self) -> None:
        """End the unit's part in the step."""
        self.to_run.clear()
        super().end_backward()
        self.is_open = False
        self.recomputes = False
