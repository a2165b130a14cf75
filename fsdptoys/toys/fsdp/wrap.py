"""``fully_shard`` with the arguments of PyTorch's, and the methods that it adds to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from .core import hooks_of, take_parameters
from .hooks import FullHooks
from .unit import FullUnit, MixedPrecisionPolicy

_classes: dict[type, type] = {}
"""Class of a module → its class after ``fully_shard``."""


class FSDPModule:
    """A module with a unit of parameters; names and meanings of methods are PyTorch's.

    ``fully_shard`` puts this class before the module's own, which ``isinstance`` still finds.
    """

    def unshard(self) -> None:
        """Gather the whole parameters."""
        self._get_fsdp_state().unit.gather()
        self._get_fsdp_state().unit.wait()

    def reshard(self) -> None:
        """Free the whole parameters and register the sharded ones."""
        self._get_fsdp_state().unit.reshard()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether the backward needs the parameters' values; an embedding's does not."""
        self._get_fsdp_state().unit.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules after this one in the forward, instead of the expected unit."""
        self._get_fsdp_state().forward_prefetch = [module._get_fsdp_state() for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these in the backward, instead of the unit that ended its forward before."""
        self._get_fsdp_state().backward_prefetch = [module._get_fsdp_state() for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this instead of the number of ranks."""
        self._get_fsdp_state().unit.divide_by = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use sums in collectives, and divide before or after them."""
        self._get_fsdp_state().unit.only_sums = enable

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether backwards reduce gradients, or accumulate them whole on each rank."""
        for unit in self._units():
            unit.reduces = requires_gradient_sync
            unit.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool) -> None:
        """Set for HSDP whether the replicas are all-reduced after the reduce-scatter."""
        for unit in self._units():
            unit.all_reduces = requires_all_reduce

    def _units(self) -> Iterator[FullUnit]:
        """Yield the units of this module and of all within it."""
        assert isinstance(self, nn.Module)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state().unit

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``to_empty``, ``half`` … to the sharded parameters; flatten these again."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._get_fsdp_state().unit.adopt()
        return result

    def _get_fsdp_state(self) -> FullHooks:
        assert isinstance(self, nn.Module)
        hooks = hooks_of(self)
        assert isinstance(hooks, FullHooks)
        return hooks


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
) -> Any:
    """Shard a module's parameters, gradients and optimizer states; call it bottom-up.

    Args:
        module: one, or several that become one unit; on the mesh's device or on meta.
        mesh: of one axis, or of two (replicate, shard: HSDP); None for all ranks of a CPU.
        reshard_after_forward: True frees whole parameters after the forward and gathers them again
            in the backward; False keeps them; None is True except for the root.
        shard_placement_fn: returns the dim to shard a parameter along; None for the first.
        mp_policy: dtypes.

    Returns:
        ``module``, changed in place to an ``FSDPModule``.

    Raises:
        ValueError: if a parameter is in a unit already, or a dim after the first divides unevenly.
        NotImplementedError: if the parameters have several dtypes or devices.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, list | tuple) else [module]
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    homes = take_parameters(modules)
    ranks = mesh.size(mesh.ndim - 1)
    dims = [_choose_dim(param, shard_placement_fn, ranks) for param in homes]
    unit = FullUnit(homes, dims, mesh, reshard_after_forward is not False, mp_policy)
    hooks = FullHooks(modules, unit, is_auto=reshard_after_forward is None)
    for member in modules:
        member.__dict__["_fsdp_hooks"] = hooks
        kind = type(member)
        if kind not in _classes:
            _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        member.__class__ = _classes[kind]
    for holder in dict.fromkeys(holder for places in homes.values() for holder, _ in places):
        # State dicts have sharded parameters; loading one may replace them.
        holder.register_state_dict_pre_hook(lambda *_: unit.reshard())
        holder.register_load_state_dict_pre_hook(lambda *_: unit.reshard())
        holder.register_load_state_dict_post_hook(lambda *_: unit.adopt())
    return module


def _choose_dim(
    param: nn.Parameter, choose: Callable[[nn.Parameter], Shard | None] | None, ranks: int
) -> int:
    placement = choose(param) if choose is not None else None
    dim = placement.dim if placement is not None else 0
    if dim > 0 and param.shape[dim] % ranks:
        raise ValueError(
            f"dim {dim} of a parameter of shape {tuple(param.shape)} cannot be sharded evenly over "
            f"{ranks} ranks; choose another dim, or the first"
        )
    return dim
