"""``fully_shard`` with the arguments of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from .core import Homes, hooks_of
from .hooks import FullHooks
from .internals import announce, is_replicated, own_tensor
from .module import FSDPModule
from .policies import MixedPrecisionPolicy, check_offload
from .tensor_parallel import outer_of
from .unit import FullUnit, refuse_extension

_classes: dict[type, type] = {}
"""Class of a module → its class after ``fully_shard``."""


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states; call it bottom-up, the root last.

    Args:
        module: one, or several that become one unit.
        mesh: of one axis, or of two (replicate, shard: HSDP); None for all ranks.
        reshard_after_forward: True frees whole parameters after the forward and gathers them again in the backward;
            False keeps them; a number reshards to that many ranks; None is True except for the root.
        shard_placement_fn: returns the dim along which a parameter is sharded; None for the first.
        mp_policy: dtypes.
        offload_policy: one that leaves shards on the device of the mesh.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: None.

    Returns:
        ``module``, changed in place to an ``FSDPModule``.

    Raises:
        NotImplementedError: for options that the table in the package's docstring leaves out.
        ValueError: for arguments that are wrong anywhere.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError("fully_shard(dp_mesh_dims=...) is not part of this implementation")
    modules: list[nn.Module] = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        _check_module(each)
    mesh = _all_ranks() if mesh is None else mesh
    check_offload(offload_policy, mesh.device_type)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")

    managed = _managed(modules)
    homes = _parameters(managed, ignored_params or set())
    _move(managed, homes, ignored_params or set(), mesh)
    ranks = mesh.size(mesh.ndim - 1)
    outers = [outer_of(places[0][1], param, mesh) for param, places in homes.items()]
    dims = [_dim(param, shard_placement_fn, ranks) for param in homes]
    reshards, smaller_mesh = _after_forward(reshard_after_forward, mesh, ranks)
    if smaller_mesh is not None and any(outers):
        raise NotImplementedError("reshard_after_forward as an int is not supported for DTensors as parameters")
    unit = FullUnit(homes, dims, mesh, outers, smaller_mesh, reshards, mp_policy)
    hooks = FullHooks(modules, unit, is_auto=reshard_after_forward is None)
    for each in modules:
        each.__dict__["_fsdp_hooks"] = hooks
        kind = type(each)
        if kind not in _classes:
            _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        each.__class__ = _classes[kind]
        announce(each)
    for holder in dict.fromkeys(holder for places in homes.values() for holder, _ in places):
        # State dicts have sharded parameters; loading one may replace them.
        holder.register_state_dict_pre_hook(lambda *_: unit.reshard())
        holder.register_load_state_dict_pre_hook(lambda *_: unit.reshard())
        holder.register_load_state_dict_post_hook(lambda *_: unit.adopt())
    return module


fully_shard.state = hooks_of  # type: ignore[attr-defined]  # as PyTorch's composable functions have it


def _check_module(module: nn.Module) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
    if hooks_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard was applied "
            f"before to {module}"
        )


def _all_ranks() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def _managed(roots: list[nn.Module]) -> list[nn.Module]:
    """List the modules whose parameters neither another unit nor DDP has, inner ones first."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen or is_replicated(module) or (module not in roots and hooks_of(module) is not None):
            return
        seen.add(module)
        for child in module.children():
            visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def _parameters(managed: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, Homes]:
    """Map every parameter of the unit to its homes."""
    homes: dict[nn.Parameter, Homes] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored:
                continue
            if param.ndim == 0:
                raise ValueError(
                    f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal "
                    "to 1."
                )
            refuse_extension(param, name)
            if not param.is_contiguous():
                raise NotImplementedError(f"FSDP does not support non-contiguous parameters yet: {name!r}")
            homes.setdefault(param, []).append((module, name))
    return homes


def _move(
    managed: list[nn.Module], homes: dict[nn.Parameter, Homes], ignored: set[nn.Parameter], mesh: DeviceMesh
) -> None:
    """Move parameters and buffers to the mesh's device, except from the meta device."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    tensors: list[Tensor] = list(homes)
    tensors += [buffer for module in managed for buffer in module.buffers(recurse=False)]
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


def _dim(param: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None, ranks: int) -> int:
    """Return the dim along which a parameter is sharded."""
    placement = shard_placement_fn(param) if shard_placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise NotImplementedError(
            f"shard_placement_fn gave {placement}: only Shard(dim) and None are part of this implementation"
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {param.ndim}D tensor: {param.shape}")
    shape = own_tensor(param).shape
    if dim > 0 and shape[dim] % ranks:
        raise NotImplementedError(f"FSDP does not support uneven sharding on dim {dim}: {shape} (world size: {ranks})")
    return dim


def _after_forward(choice: bool | int | None, mesh: DeviceMesh, ranks: int) -> tuple[bool, DeviceMesh | None]:
    """Return whether to reshard after the forward, and the mesh of fewer ranks, if any."""
    if choice is None or isinstance(choice, bool):
        return choice is not False, None
    if not isinstance(choice, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {choice}"
        )
    if choice < 1 or ranks % choice:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not {choice}")
    if choice in (1, ranks):
        return choice == ranks, None
    return True, DeviceMesh(mesh.device_type, mesh.mesh.view(-1, choice))
