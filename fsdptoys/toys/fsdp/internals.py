"""PyTorch's private functions that the extensions of ``core`` need; the only such calls in them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard


def in_backward() -> bool:
    """Return whether this thread runs a backward; a forward is a recomputation then."""
    return torch._C._current_graph_task_id() != -1


def announce(module: nn.Module) -> None:
    """Register a module where ``replicate``, DDP for parts of a model, looks for modules to leave alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``replicate`` has a module."""
    return "replicate" in (_get_registry(module) or {})


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int] = ()
) -> DTensor:
    """Return a DTensor with the given local tensor; the stride is that of a contiguous tensor by default."""
    whole = torch.empty(tuple(shape), device="meta")
    with torch.no_grad():  # keeps the conversion out of autograd's graph
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=tuple(stride) or whole.stride()
        )


def local_tensor(param: Tensor) -> Tensor:
    """Return a DTensor's own local tensor; ``to_local`` of a parameter returns another one since torch 2.13."""
    assert isinstance(param, DTensor)
    return param._local_tensor


def own_tensor(param: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return local_tensor(param) if isinstance(param, DTensor) else param


def set_local_tensor(param: Tensor, local: Tensor) -> None:
    """Replace a DTensor's local tensor; the DTensor stays the same object for the optimizer."""
    assert isinstance(param, DTensor)
    param._local_tensor = local


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the axes of two slices of one mesh."""
    if not hasattr(DeviceMesh, "_concatenate"):
        raise NotImplementedError("DTensors as parameters need a newer torch, whose meshes can be joined")
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, parts: int) -> Placement:
    """Return the placement of an axis that shards a dim which another axis has cut into ``parts``."""
    return _StridedShard(dim, split_factor=parts)


def call_accumulate_hooks(param: nn.Parameter) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook``: autograd does not see sharded parameters."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)
