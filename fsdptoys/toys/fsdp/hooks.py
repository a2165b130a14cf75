"""Hooks for all of PyTorch's ``fully_shard``: prefetching, recomputation, units of several modules, mixed precision.

- Prefetching: the forward gathers the unit that came next in the last step, or the units that the user lists; the
  backward the one whose forward ended before, or a list. A wrong guess costs one all-gather.
- Recomputation needs no gathering of its own: a module's ``pre_backward`` has come before it.
- Several modules share a unit: the first of them to run gathers it, the last one reshards it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensor_tree import map_tensors
from .core import Iteration, UnitHooks, hooks_of
from .gradients import BoundedReductions
from .internals import in_backward
from .policies import cast
from .unit import FullUnit


def _leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable compilation of hooks inside compiled code.

    torch's own optimizers use ``_disable_dynamo``, which imports the compiler later; private in torch 2.7 to 2.13.
    """
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


class FullIteration(Iteration):
    """A step's state with the order of forwards."""

    hooks: list[FullHooks]  # type: ignore[assignment]
    reductions: BoundedReductions

    def __init__(self) -> None:
        super().__init__()
        self.reductions = BoundedReductions()
        self.outermost: FullHooks | None = None
        """Outermost unit of the running forward."""
        self.is_last_backward = True
        self.order: list[FullHooks] = []
        """Units in the order of this step's forwards."""
        self.expected: list[FullHooks] = []
        """The same of the last step."""
        self.guess: FullUnit | None = None
        """Gathered because it is expected next."""
        self.optimizer_event: Any = None

    def end_backward(self) -> None:
        """End the forward as well, where it is still open."""
        self.outermost = None
        super().end_backward()

    def end_step(self) -> None:
        """Keep collectives in flight if another backward follows."""
        if self.is_last_backward:
            super().end_step()


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
        self.is_root: bool | None = None
        """None until the first forward decides."""
        self.is_open = False
        """Whether the forward of one of the modules has begun, and that of the last has not ended."""
        self.recomputes = False
        """Whether forwards are recomputations: from the begin of the unit's backward to the end of the whole one."""
        self.to_run: set[nn.Module] = set()
        """Of several modules, those whose forward is still to come."""
        self.forward_prefetch: list[FullHooks] = []
        self.backward_prefetch: list[FullHooks] = []

    # Forward.

    @_leave_uncompiled
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole; begin to gather the next unit."""
        if len(self.modules) > 1 and not self.to_run:
            self.to_run.update(self.modules)
        is_first = not self.recomputes and not self.is_open
        if is_first:
            args, kwargs = self._begin(args, kwargs)
        if self.unit.mp_policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.unit.mp_policy.param_dtype)
        if self.recomputes or self.phase == "forward":  # in this phase another of the modules watches its inputs
            self.unit.gather()
            self.unit.wait()
        else:
            args, kwargs = super().pre_forward(module, args, kwargs)
        if is_first:
            self._prefetch_forward()
        return args, kwargs

    @_leave_uncompiled
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after the last of the modules."""
        iteration = self.iteration
        if len(self.modules) > 1:
            self.to_run.discard(module)
            if self.to_run:
                if iteration.outermost is self:
                    iteration.outermost = None  # called by itself
                return cast(output, self.unit.mp_policy.output_dtype)
        if not self.recomputes:
            self._end_forward(output)
            if iteration.outermost is self:
                # Units of which only some modules ran: the rest may be called by itself, as a head per chunk.
                for hooks in reversed(iteration.hooks):
                    if hooks is not self and hooks.to_run:
                        hooks._end_forward(output)
                        hooks.to_run.clear()
                if iteration.guess is not None:
                    iteration.guess.end_gathering()
                iteration.outermost = iteration.guess = None
        return cast(output, self.unit.mp_policy.output_dtype)

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Record the order; begin a step if this is the outermost forward."""
        self.is_open = True
        self.become_root()
        iteration = self.iteration
        if iteration.outermost is None:
            iteration.outermost = self
            if self.is_root and not in_backward():
                iteration.expected, iteration.order = iteration.order, []
            event, iteration.optimizer_event = iteration.optimizer_event, None
            if event is not None:
                event.wait()
            device = self.unit.mesh.device_type
            if device != "cpu":
                args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
        if self._follows_order():
            iteration.order.append(self)
        return args, kwargs

    def _follows_order(self) -> bool:
        """Return whether this forward is part of the root's, has parameters, and is no recomputation."""
        outermost = self.iteration.outermost
        is_part = outermost is not None and outermost.is_root is True and not in_backward()
        return is_part and bool(self.unit.params)

    def become_root(self) -> None:
        """Make the first module that runs the root of all within it.

        Raises:
            RuntimeError: if it cannot be.
            ValueError: if a parameter belongs to two units.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        found: dict[FullHooks, None] = {}
        for name, module in self.modules[0].named_modules():
            hooks = hooks_of(module)
            if isinstance(hooks, FullHooks) and hooks not in found:
                if hooks is not self and hooks.is_root is not None:
                    raise RuntimeError(
                        f"FSDP state has already been lazily initialized for {name}\nFSDP requires running forward "
                        "through the root module first"
                    )
                found[hooks] = None
        seen: set[int] = set()
        for unit in (hooks.unit for hooks in found):
            for param, origin in zip(unit.params, unit.origins, strict=True):
                if origin in seen:
                    raise ValueError(
                        f"parameter {param.homes[0][1]!r} is shared with one already managed by another FSDP group; "
                        "call fully_shard([module_a, module_b]) to have its modules in one unit"
                    )
                seen.add(origin)
        super().become_root()
        for hooks in self.iteration.hooks:
            hooks.is_root = hooks is self
            hooks.unit.prepare(self.modules[0])
        self.iteration.reductions.ahead = max(hooks.unit.ahead for hooks in self.iteration.hooks)
        if self.is_auto:
            self.unit.reshards_after_forward = False  # its backward comes next

    _lazy_init = become_root  # called by PyTorch's tools

    def _prefetch_forward(self) -> None:
        for hooks in self.forward_prefetch:
            hooks.unit.gather()
        iteration = self.iteration
        here = len(iteration.order) - 1
        if self.forward_prefetch or not self._follows_order() or here + 1 >= len(iteration.expected):
            return
        if iteration.expected[here] is self:
            iteration.guess = iteration.expected[here + 1].unit
            iteration.guess.gather()

    def _end_forward(self, output: Any) -> None:
        super().post_forward(self.modules[0], (), output)
        self.is_open = False

    def leave_forward(self) -> None:
        """Reshard, maybe to fewer ranks; a recomputation has its place in the order, and its backward comes next."""
        if not in_backward():
            self.unit.shrink()
            super().leave_forward()

    # Backward.

    def pre_backward(self, grad: Tensor) -> Tensor:
        """Treat forwards as recomputations from now on; gather the listed units."""
        self.recomputes, self.is_open = True, False
        super().pre_backward(grad)
        for hooks in self.backward_prefetch:
            if hooks.unit.gathers_in_backward:
                hooks.unit.gather()
        return grad

    def prefetch_backward(self) -> None:
        """Gather the unit whose forward ended before, if the user lists none."""
        if not self.backward_prefetch:
            super().prefetch_backward()

    def post_backward(self) -> None:
        """Finish reductions if nothing else will.

        One of several modules, called by itself, has no ``pre_backward``, so no callback at the backward's end.
        """
        by_itself = len(self.modules) > 1 and self.phase == "forward"
        super().post_backward()
        if by_itself:
            self.iteration.reductions.finish()

    def end_backward(self) -> None:
        """End the unit's part in the step."""
        self.to_run.clear()
        super().end_backward()
        self.is_open = self.recomputes = False

    def reset(self) -> None:
        """Discard a step that ended with an exception.

        Raises:
            RuntimeError: if this is not the root.
        """
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        iteration = self.iteration
        iteration.reductions.forget()
        iteration.finished.clear()
        iteration.order.clear()
        iteration.outermost = iteration.guess = None
        iteration.awaits_end = False
        for hooks in iteration.hooks or [self]:
            hooks.unit.reshard()
            hooks.unit.forget_gradients()
            hooks.phase = "idle"
            hooks.is_open = hooks.recomputes = False
            hooks.to_run.clear()
            hooks.turns.clear()
