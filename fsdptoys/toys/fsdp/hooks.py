"""When a unit is gathered, resharded and reduced: hooks around the forward and the backward of its modules.

    forward    pre_forward ── gather, wait, gather the next unit ── module ── post_forward: reshard
    backward   pre_backward ── gather, wait, gather the next unit ── autograd ── post_backward: reshard, reduce
                (first gradient of an output)                                  (gradients of the inputs are there)

Modules whose inputs have no gradient, such as an embedding, never see theirs: the end of the backward catches up.

Which unit is next? In the backward the one before, in the order in which forwards ended. In the forward the one that
came next in the step before. Lists given by the user take the place of both. A wrong guess costs an all-gather.

Recomputation needs no gathering of its own: a module's pre_backward has come before it, and its hooks see that.

What the units under one root know together, from a forward to the end of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .internals import call_after_backward, in_backward
from .reduction import Gradients, Reductions
from .tensors import cast, map_tensors, with_gradient
from .unit import Phase, Unit


class Iteration:
    """What the units under one root know together."""

    def __init__(self) -> None:
        self.drivers: list[Driver] = []
        """All, the root first."""
        self.forward_root: Driver | None = None
        """Whose forward is the outermost that runs."""
        self.is_last_backward = True
        self.waits_for_end = False
        """Whether the end of the backward that runs is awaited already."""
        self.order: list[Driver] = []
        """In which forwards began in this step."""
        self.expected: list[Driver] = []
        """The same in the step before."""
        self.guess: Unit | None = None
        """Being gathered because its turn is expected."""
        self.finished: list[Driver] = []
        """Whose forwards ended and whose backward is to come, with repetitions."""
        self.reductions = Reductions()
        self.optimizer_event: Any = None

    def end_backward(self) -> None:
        """Catch up on units whose inputs had no gradient, and wait for the reductions."""
        self.forward_root = None
        for driver in self.drivers:
            driver.to_run.clear()
            if driver.unit.phase is not Phase.post_backward:
                driver.post_backward()
            driver.unit.phase = driver.phase = Phase.idle
            if self.is_last_backward:
                driver.unit.drop()
                driver.turns.clear()
        if self.is_last_backward:
            self.finished.clear()
            self.reductions.finish()
        self.waits_for_end = False

    def refuse_shared_parameters(self) -> None:
        """Each parameter must be in one unit, or it would be two parameters from now on.

        Raises:
            ValueError: naming one that is in two.
        """
        seen: set[int] = set()
        for driver in self.drivers:
            for param in driver.unit.params:
                if param.origin in seen:
                    raise ValueError(
                        f"parameter {param.homes[0][1]!r} is shared with one already managed by another FSDP group; "
                        "call fully_shard([module_a, module_b]) to have its modules in one unit"
                    )
                seen.add(param.origin)


def _leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` for hooks within what is compiled.

    What torch uses for its own optimizers waits with importing the compiler; it is private, in torch 2.7 and 2.13.
    """
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


class Driver:
    """The hooks of the modules of one unit.

    Args:
        modules: that were given to ``fully_shard`` together.
        unit: their parameters; may have none.
        is_auto: whether the root is not to reshard after the forward.
    """

    def __init__(self, modules: Sequence[nn.Module], unit: Unit, is_auto: bool) -> None:
        self.modules = list(modules)
        self.unit = unit
        self.gradients = Gradients(unit)
        self.is_auto = is_auto
        self.phase = Phase.idle
        """Unlike the unit's, it stays ``pre_backward`` until the backward's end: whatever runs is a recomputation."""
        self.iteration = Iteration()
        self.is_root: bool | None = None
        """None until the first forward decides."""
        self.to_run: set[nn.Module] = set()
        """Of several modules, those whose forward is still to come."""
        self.turns: list[int] = []
        """Where it stands in the order of ended forwards."""
        self.forward_prefetch: list[Driver] = []
        self.backward_prefetch: list[Driver] = []
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=len(self.modules) > 1)

    # Forward.

    @_leave_uncompiled
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the parameters whole; let the inputs tell when the backward has passed."""
        if len(self.modules) > 1 and not self.to_run:
            self.to_run.update(self.modules)
        if self.phase is Phase.pre_backward:
            self.unit.gather()
            self.unit.wait()
            return self._cast_inputs(args, kwargs)
        is_first = self.phase is not Phase.forward
        self.phase = Phase.forward
        if is_first:
            args, kwargs = self._begin(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        watched = self.unit.phase is Phase.forward  # by another of its modules
        self.unit.phase = Phase.forward
        self.unit.gather()
        self.unit.wait()
        if not watched:
            args, kwargs = self._watch_inputs(args, kwargs)
        if is_first:
            self._gather_next()
        return args, kwargs

    @_leave_uncompiled
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after the last of the modules; let the output tell when the backward comes."""
        if len(self.modules) > 1:
            self.to_run.discard(module)
            if self.to_run:
                if self.iteration.forward_root is self:
                    self.iteration.forward_root = None  # called by itself
                return cast(output, self.unit.mp_policy.output_dtype)
        if self.phase is not Phase.pre_backward:
            self._end_forward(output)
            iteration = self.iteration
            if iteration.forward_root is self:
                # Of some units only a part of the modules ran; the rest may be called by itself, as a head per chunk.
                for driver in reversed(iteration.drivers):
                    if driver is not self and driver.to_run:
                        driver._end_forward(output)
                        driver.to_run.clear()
                if iteration.guess is not None:
                    iteration.guess.drop()
                    iteration.guess = None
                iteration.forward_root = None
        return cast(output, self.unit.mp_policy.output_dtype)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Once a forward: note the order, and begin an iteration where this is the outermost forward."""
        self.become_root()
        iteration = self.iteration
        if iteration.forward_root is None:
            iteration.forward_root = self
            if self.is_root and not in_backward():
                iteration.expected, iteration.order = iteration.order, []
            event, iteration.optimizer_event = iteration.optimizer_event, None
            if event is not None:
                event.wait()
            device = self.unit.shard.mesh.device_type
            if device != "cpu":
                args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        if self._follows_order():
            iteration.order.append(self)
        return args, kwargs

    def _follows_order(self) -> bool:
        """Whether this forward is part of the root's and not a recomputation, and there is something to gather."""
        outermost = self.iteration.forward_root
        is_part = outermost is not None and outermost.is_root is True and not in_backward()
        return is_part and bool(self.unit.params)

    def become_root(self) -> None:
        """Let the first module that runs be the root of all others within it.

        Raises:
            RuntimeError: if it cannot be.
            ValueError: if a parameter belongs to two units.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        drivers: dict[Driver, None] = {}
        for name, module in self.modules[0].named_modules():
            driver = driver_of(module)
            if driver is not None and driver not in drivers:
                if driver is not self and driver.is_root is not None:
                    raise RuntimeError(
                        f"FSDP state has already been lazily initialized for {name}\nFSDP requires running forward "
                        "through the root module first"
                    )
                drivers[driver] = None
        self.iteration.drivers = list(drivers)
        self.iteration.refuse_shared_parameters()
        for driver in drivers:
            driver.is_root = driver is self
            driver.iteration = self.iteration
            driver.unit.prepare(self.modules[0])
            self.iteration.reductions.ahead = max(self.iteration.reductions.ahead, driver.gradients.ahead)
        if self.is_auto:
            self.unit.reshards_after_forward = False  # its backward comes next

    _lazy_init = become_root  # what PyTorch's tools call on the state of a module

    def _gather_next(self) -> None:
        """Begin to gather what the forward needs next."""
        for driver in self.forward_prefetch:
            driver.unit.gather()
        iteration = self.iteration
        here = len(iteration.order) - 1
        if self.forward_prefetch or not self._follows_order() or here + 1 >= len(iteration.expected):
            return
        if iteration.expected[here] is self:
            iteration.guess = iteration.expected[here + 1].unit
            iteration.guess.gather()

    def _end_forward(self, output: Any) -> None:
        if not in_backward():  # what is computed again has its place in the order
            self.unit.reshard_after_forward()
            if torch.is_grad_enabled() and self.unit.params:
                self.turns.append(len(self.iteration.finished))
                self.iteration.finished.append(self)
        self.unit.phase = self.phase = Phase.idle
        if torch.is_grad_enabled():
            for tensor in with_gradient(output):
                tensor.register_hook(self.pre_backward)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        policy = self.unit.mp_policy
        changed: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
        return cast(changed, policy.param_dtype) if policy.cast_forward_inputs else changed

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the inputs through a function whose backward runs when those of all the modules have."""
        inputs = with_gradient((args, kwargs)) if torch.is_grad_enabled() and self.unit.params else []
        if not inputs:
            return args, kwargs
        outputs = iter(_AfterBackward.apply(self, *inputs))
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
            lambda tensor: next(outputs) if tensor.requires_grad else tensor, (args, kwargs)
        )
        return replaced

    # Backward.

    def pre_backward(self, grad: Tensor) -> Tensor:
        """Have the parameters whole again."""
        self.phase = Phase.pre_backward
        if not self.iteration.waits_for_end:
            self.iteration.waits_for_end = True
            call_after_backward(self.iteration.end_backward)
        if self.unit.phase is not Phase.pre_backward:
            self.unit.phase = Phase.pre_backward
            self._gather_for_backward()
            self.unit.wait()
            if not self.backward_prefetch and self.turns:
                turn = self.turns.pop()
                if turn > 0:
                    self.iteration.finished[turn - 1]._gather_for_backward()
        for driver in self.backward_prefetch:
            driver._gather_for_backward()
        return grad

    def _gather_for_backward(self) -> None:
        if self.unit.gathers_in_backward:
            self.unit.gather()

    def post_backward(self) -> None:
        """Reshard, and begin to reduce the gradients."""
        # A module of several that is called by itself has no pre_backward, and nothing awaits the end of its backward.
        by_itself = len(self.modules) > 1 and self.unit.phase is Phase.forward
        self.unit.phase = Phase.post_backward
        taken = self.gradients.take()
        if self.unit.reshards_after_backward:
            self.unit.reshard()
        reductions = self.iteration.reductions
        reductions.advance()
        if taken:
            reductions.start(self.gradients.reduce(taken))
        if by_itself:
            reductions.finish()

    def reset(self) -> None:
        """Forget a step that ended with an exception, all of it."""
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        iteration = self.iteration
        iteration.reductions.forget()
        iteration.finished.clear()
        iteration.order.clear()
        iteration.forward_root = iteration.guess = None
        iteration.waits_for_end = False
        for driver in iteration.drivers or [self]:
            driver.unit.reshard()
            driver.gradients.forget()
            driver.unit.phase = driver.phase = Phase.idle
            driver.to_run.clear()
            driver.turns.clear()


class _AfterBackward(torch.autograd.Function):
    """Hands inputs on, and calls ``post_backward`` when their gradients come back."""

    @staticmethod
    def forward(ctx: Any, driver: Driver, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.driver = driver
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.driver.post_backward()
        return (None, *grads)


def driver_of(module: nn.Module) -> Driver | None:
    """The hooks that ``fully_shard`` gave a module, if it did."""
    driver: Driver | None = module.__dict__.get("_fsdp_driver")
    return driver
