"""What a module can do once ``fully_shard`` has made it an ``FSDPModule``; names and meanings are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from .hooks import Driver, driver_of
from .unit import Unit


class UnshardHandle:
    """For waiting on ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Have the whole parameters registered."""
        if self._unit is not None:
            self._unit.wait()
            self._unit = None


class FSDPModule:
    """A module whose parameters, or some of them, are a unit.

    ``fully_shard`` puts this class before the module's own, so that ``isinstance`` and methods still find that one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: a slice of a sharded ``nn.Sequential`` is made so, and is not sharded."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy; use state dicts")

    # This module only.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the whole parameters; with ``async_op`` the forward, or the handle, waits for them."""
        unit = self._driver().unit
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
        self._driver().unit.reshard()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether the backward needs the parameters' values; that of a look-up does not."""
        self._driver().unit.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Begin to gather these after this module's own parameters in the forward, instead of guessing."""
        self._driver().forward_prefetch = _drivers_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in the backward, instead of the one whose forward ended before."""
        self._driver().backward_prefetch = _drivers_of(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this, instead of the number of ranks."""
        self._driver().gradients.divide_by = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only add, and divide beside them."""
        self._driver().gradients.only_sums = enable

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call a function with this rank's flat reduced gradients, before they are divided where that is done here."""
        if stream is not None:
            _refuse("set_all_reduce_hook(stream=...)", "there are no streams here")
        self._driver().gradients.hook = hook

    # The root.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether reductions must be done when the next backward ends."""
        self._driver().iteration.is_last_backward = is_last_backward

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward wait for an event, where the optimizer runs on another stream."""
        self._driver().iteration.optimizer_event = event

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward, forget that step with all its gradients."""
        self._driver().reset()

    # This module and all within it.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backwards reduce gradients, or keep them whole on each rank."""
        for driver in self._drivers(recurse):
            driver.gradients.reduces = driver.gradients.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Under HSDP, say whether they go on over the replicas after the reduce-scatter."""
        for driver in self._drivers(recurse):
            driver.gradients.all_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for driver in self._drivers(recurse):
            driver.is_auto = False
            driver.unit.reshards_after_forward = reshard_after_forward
            driver.unit.stop_shrinking()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether they are freed after the backward; else the next forward finds them."""
        for driver in self._drivers(recurse):
            driver.unit.reshards_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters that got no gradient, since other ranks may have used them."""
        for driver in self._drivers(recurse):
            driver.gradients.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let so many units' gradients be on their way at a time; must come before the first forward."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for driver in self._drivers(recurse):
            driver.gradients.ahead = max_input_buffers

    # What PyTorch has and this has not.

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Not here."""
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Not here."""
        _refuse("set_custom_reduce_scatter")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> NoReturn:
        """Not here."""
        _refuse("set_separate_reduce_scatter_group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        """Not here."""
        _refuse("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not here."""
        _refuse("set_symm_mem_for_comm")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty``, ``half`` …: act on the sharded parameters, then make one flat shard of them again."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._driver().unit.adopt()
        return result

    def _get_fsdp_state(self) -> Driver:
        """What PyTorch's utilities ask for; has other attributes than PyTorch's."""
        return self._driver()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Pipelines ask for asynchronous gathering, which is the only one here."""
        if not async_op:
            _refuse("_set_unshard_async_op(False)", "gathering is asynchronous always")

    def _driver(self) -> Driver:
        assert isinstance(self, nn.Module)
        driver = driver_of(self)
        assert driver is not None
        return driver

    def _drivers(self, recurse: bool) -> Iterator[Driver]:
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else [self]:
            driver = driver_of(module)
            if driver is not None:
                yield driver


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather and reshard around another method than ``forward`` too; nothing happens where a module is no FSDPModule.

    Args:
        module: that has the method.
        method_name: of the method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method, driver = getattr(module, method_name), module._driver()

    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = driver.pre_forward(module, args, kwargs)
        return driver.post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, gathered)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, as the chunks of a pipeline, have their reductions in one queue, and so their memory.

    Args:
        modules: the roots.
    """
    for driver in (drivers := _drivers_of(modules)):
        driver.iteration.reductions = drivers[0].iteration.reductions


def _drivers_of(modules: list[FSDPModule]) -> list[Driver]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._driver() for module in modules]


def _refuse(what: str, why: str = "see the table in fsdptoys.toys.fsdp") -> NoReturn:
    raise NotImplementedError(f"{what} is not part of this implementation: {why}")
