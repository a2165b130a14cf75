"""Fake tensors that PyTorch's distributed code accepts as real ones.

A ``FakeTensor`` has a shape, a dtype and a device. FSDP, DDP and this project need more: memory sharing, compared by
address; moving a flat parameter's data between host and device; replacing a module's parameters. PyTorch has no public
API for any of it; tested with torch 2.7.1 and 2.13.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # compares signatures of replaced functions when imported
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed as ddp

import fsdptoys.parallel.mesh

from .fake_device import MODULE


class _FakeMode(FakeTensorMode):
    """Fake tensors on a device that must not be initialized."""

    avoid_device_init = True


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """Make every tensor fake."""
    data = Tensor.data
    make_subclass = Tensor._make_subclass
    storage_address, tensor_address = torch.UntypedStorage.data_ptr, Tensor.data_ptr

    def make_alike(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Autograd replaces data only by data of the same backend, and treats the fake device as another one.
        if cls is FakeTensor and device_type != "cpu":
            kwargs["device_for_backend_keys"] = torch.device(device_type, 0)
        return make_subclass(cls, *args, **kwargs)

    def set_data(tensor: Tensor, new: Tensor) -> None:
        data.__set__(tensor, new)  # type: ignore[attr-defined]
        if isinstance(tensor, FakeTensor) and isinstance(new, FakeTensor):
            tensor.fake_device = new.fake_device

    def address_of_storage(storage: torch.UntypedStorage) -> int:
        return storage._cdata * bool(storage.nbytes()) if storage.device.type == "meta" else storage_address(storage)

    def address(tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return tensor_address(tensor)
        return address_of_storage(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    replacements: list[tuple[Any, str, Any]] = [
        (Tensor, "_make_subclass", staticmethod(make_alike)),
        (Tensor, "data", property(data.__get__, set_data)),  # type: ignore[attr-defined]
        (torch.UntypedStorage, "data_ptr", address_of_storage),
        (Tensor, "data_ptr", address),
        (nn.Module, "_apply", _apply),
        (torch, "Generator", _Generator),
        (torch.accelerator, "set_device_index", lambda device: None),
        (torch.accelerator, "current_stream", MODULE.current_stream),
        # The other ranks do not exist.
        (ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        (dist.Reducer, "_rebuild_buckets", lambda reducer: False),
        (ddp.DistributedDataParallel, "_ddp_init_helper", _with_buckets(ddp.DistributedDataParallel._ddp_init_helper)),
        # Meshes read their rank numbers.
        (DeviceMesh, "__init__", _really(DeviceMesh.__init__)),
        (DeviceMesh, "__getitem__", _really(DeviceMesh.__getitem__)),
        (fsdptoys.parallel.mesh, "init_device_mesh", _really(fsdptoys.parallel.mesh.init_device_mesh)),
        (fsdptoys.parallel.mesh, "hybrid_mesh", _really(fsdptoys.parallel.mesh.hybrid_mesh)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_FakeMode(allow_non_fake_inputs=True))
        yield


def _with_buckets(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let DDP start with the buckets that it builds after its first step; it sizes the first ones by sys.maxsize."""

    def call(wrapped: ddp.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        limit = SimpleNamespace(maxsize=wrapped.bucket_bytes_cap)
        with mock.patch.object(ddp, "sys", limit):
            return init(wrapped, *args, **kwargs)

    return call


class _Generator(torch._C.Generator):
    """A host generator for any device; its numbers are never drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on real tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    return call


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``, which cannot replace one fake tensor by another."""
    for child in module.children() if recurse else ():
        child._apply(function)
    with torch.no_grad():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(function(param), requires_grad=param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module
