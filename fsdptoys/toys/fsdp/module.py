"""Methods that ``fully_shard`` adds to a module; names and meanings are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from .core import hooks_of
from .hooks import FullHooks
from .unit import FullUnit


class UnshardHandle:
    """Waits for ``unshard(async_op=True)``."""

    def __init__(self, unit: FullUnit) -> None:
        self._unit: FullUnit | None = unit

    def wait(self) -> None:
        """Register the whole parameters."""
        if self._unit is not None:
            self._unit.wait()
            self._unit = None


def _unsupported(name: str) -> Callable[..., NoReturn]:
    """Make a method that raises NotImplementedError."""
    return lambda *_, **__: _reject(name)


class FSDPModule:
    """A module with a unit of parameters.

    ``fully_shard`` puts this class before the module's own, which ``isinstance`` and method calls still find.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: a slice of a sharded ``nn.Sequential`` is not sharded."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy; use state dicts")

    # This module only.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the whole parameters; with ``async_op`` the forward or the handle waits for them."""
        unit = self._unit_hooks().unit
        assert isinstance(self, nn.Module)
        unit.prepare(self)
        unit.gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the whole parameters and register the sharded ones."""
        self._unit_hooks().unit.reshard()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether the backward needs the parameters' values; an embedding's does not."""
        self._unit_hooks().unit.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules after this one in the forward, instead of the expected next unit."""
        self._unit_hooks().forward_prefetch = _hooks_of_all(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules after this one in the backward, instead of the one whose forward ended before."""
        self._unit_hooks().backward_prefetch = _hooks_of_all(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this instead of the number of ranks."""
        self._unit_hooks().unit.divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor
    """Old name."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use sums in collectives, and divide before or after them."""
        self._unit_hooks().unit.only_sums = enable

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call a function with this rank's flat reduced gradients, before a division that follows the collective."""
        if stream is not None:
            _reject("set_all_reduce_hook(stream=...)", "there are no streams here")
        self._unit_hooks().unit.hook = hook

    # The root.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of the next backward waits for all reductions."""
        self._unit_hooks().iteration.is_last_backward = is_last_backward

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward wait for an event, for an optimizer on another stream."""
        self._unit_hooks().iteration.optimizer_event = event

    def reset_iter_state(self) -> None:
        """Discard a step that ended with an exception, including its gradients."""
        self._unit_hooks().reset()

    # This module and all within it.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients, or accumulate them whole on each rank."""
        for hooks in self._all_hooks(recurse):
            hooks.unit.reduces = hooks.unit.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set for HSDP whether gradients are all-reduced over the replicas after the reduce-scatter."""
        for hooks in self._all_hooks(recurse):
            hooks.unit.all_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for hooks in self._all_hooks(recurse):
            hooks.is_auto = False
            hooks.unit.reshards_after_forward = reshard_after_forward
            hooks.unit.stop_shrinking()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after the backward; the next forward reuses them otherwise."""
        for hooks in self._all_hooks(recurse):
            hooks.unit.reshards_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters without gradient, which other ranks may have used."""
        for hooks in self._all_hooks(recurse):
            hooks.unit.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' gradients may be in flight; call it before the first forward."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for hooks in self._all_hooks(recurse):
            hooks.unit.ahead = max_input_buffers

    # Methods of PyTorch's class that raise NotImplementedError.

    set_custom_all_gather = _unsupported("set_custom_all_gather")
    set_custom_reduce_scatter = _unsupported("set_custom_reduce_scatter")
    set_separate_reduce_scatter_group = _unsupported("set_separate_reduce_scatter_group")
    set_allocate_memory_from_process_group_for_comm = _unsupported("set_allocate_memory_from_process_group_for_comm")
    set_symm_mem_for_comm = _unsupported("set_symm_mem_for_comm")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``to_empty``, ``half`` … to the sharded parameters, then flatten these again."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._unit_hooks().unit.adopt()
        return result

    def _get_fsdp_state(self) -> FullHooks:
        """For PyTorch's utilities; the attributes are not those of PyTorch's ``FSDPState``."""
        return self._unit_hooks()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        if not async_op:
            _reject("_set_unshard_async_op(False)", "gathering is asynchronous always")

    def _unit_hooks(self) -> FullHooks:
        assert isinstance(self, nn.Module)
        hooks = hooks_of(self)
        assert isinstance(hooks, FullHooks)
        return hooks

    def _all_hooks(self, recurse: bool) -> Iterator[FullHooks]:
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else [self]:
            hooks = hooks_of(module)
            if isinstance(hooks, FullHooks):
                yield hooks


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather and reshard around another method than ``forward``; other modules stay as they are."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method, hooks = getattr(module, method_name), module._unit_hooks()

    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        return hooks.post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, gathered)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Put the reductions of several roots, such as the stages of a pipeline, into one queue, to bound their memory."""
    for hooks in (all_hooks := _hooks_of_all(modules)):
        hooks.iteration.reductions = all_hooks[0].iteration.reductions


def _hooks_of_all(modules: list[FSDPModule]) -> list[FullHooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._unit_hooks() for module in modules]


def _reject(name: str, reason: str = "see the table in fsdptoys.toys.fsdp") -> NoReturn:
    raise NotImplementedError(f"{name} is not part of this implementation: {reason}")
