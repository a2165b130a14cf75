"""What PyTorch has no public way to do, one function each; the only such lines of this package."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard


def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """``setattr(module, name, param)`` without its checks, which cost more than all else that resharding does."""
    module._parameters[name] = param


def announce(module: nn.Module) -> None:
    """Enter a module where ``replicate``, which is DDP for parts of a model, looks for what it must leave alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether ``replicate`` has a module already."""
    return "replicate" in (_get_registry(module) or {})


def local_tensor(param: Tensor) -> Tensor:
    """A DTensor's own local tensor; ``to_local`` returns another one from torch 2.13 on, where it is a parameter."""
    assert isinstance(param, DTensor)
    return param._local_tensor


def own_tensor(param: Tensor) -> Tensor:
    """What this rank has of a parameter, whether that is cut or not."""
    return local_tensor(param) if isinstance(param, DTensor) else param


def set_local_tensor(param: Tensor, local: Tensor) -> None:
    """Let a DTensor keep its elements elsewhere, without becoming another object for the optimizer."""
    assert isinstance(param, DTensor)
    param._local_tensor = local


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """One mesh with the axes of two that were cut from the same one."""
    if not hasattr(DeviceMesh, "_concatenate"):
        raise NotImplementedError("DTensors as parameters need a newer torch, whose meshes can be joined")
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, parts: int) -> Placement:
    """The placement of an axis that cuts what another axis has cut into parts along the same dim."""
    return _StridedShard(dim, split_factor=parts)


def accumulated(param: nn.Parameter) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook``: autograd does not know of sharded parameters."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call once, when the backward that is running has reached all its leaves."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1
