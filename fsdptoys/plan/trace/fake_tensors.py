"""Fake tensors that PyTorch's distributed code accepts as real ones.

A ``FakeTensor`` has a shape, a dtype and a device. FSDP, DDP and this project need more: memory
sharing, compared by address; moving a flat parameter's data between host and device; replacing a
module's parameters. PyTorch has no public API for any of it; tested with torch 2.7.1 and 2.13.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # compares signatures of replaced functions when imported
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import distributed as ddp

from fsdptoys.models.foreign import adapter
from fsdptoys.parallel import device_mesh

from .fake_device import MODULE, replaced
from .fsdp1_streams import fsdp1_streams

FACTORIES = (
    "empty",
    "empty_like",
    "empty_strided",
    "zeros",
    "zeros_like",
    "new_zeros",
    "_to_copy",
)
WRITERS = (
    "zero_",
    "copy_",
    "add_",
    "mul_",
    "div_",
    "mm",
    "cat",
    "_fused_adamw_",
    "_foreach_copy_",
    "_foreach_add_",
)
FSDP = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
DIRECT = frozenset(f"aten::{name}" for name in FACTORIES + WRITERS) | {
    f"fsdp::{name}" for name in FSDP
}
"""Operators that run directly on meta tensors, besides views."""
META = torch.device("meta")
MANY = 16
"""Number of chunks, or of tensors to join, from which each has no operators of its own."""


class _FakeMode(FakeTensorMode):
    """Fake tensors on a device that must not be initialized.

    Most operators of a step are views, or make or write tensors of one device. PyTorch's own
    dispatch takes 0.1 ms for each, most of it to look up a cache; these are run on the meta tensors
    directly (private API, like the rest).
    """

    avoid_device_init = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._direct: dict[Any, bool] = {}
        # Of the results on a device, all alike
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as ``OpRecorder``

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Asked everywhere in C++
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return META if self.in_kernel_invocation else args[0].fake_device
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator directly, if it is known to allow that, or as PyTorch does."""
        device = self._device_of_result(func, args, kwargs)
        if device is None:
            return super().dispatch(func, types, args, kwargs)
        on_meta = kwargs or {}
        if func.overloadpacket is torch.ops.aten.cat and _are_many_alike(args[0]):
            return (
                on_meta["out"] if "out" in on_meta else self._join(*args, device=device)
            )
        if on_meta.get("device") is not None:
            on_meta = {
                name: value for name, value in on_meta.items() if name != "pin_memory"
            } | {"device": META}
        try:
            with in_kernel_invocation_manager(self):
                result = func(*args, **on_meta)
        except NotImplementedError:  # without a kernel for meta tensors
            self._direct[func] = False
            return super().dispatch(func, types, args, kwargs)
        if isinstance(result, (list, tuple)):
            return [self._fake(tensor, device) for tensor in result]
        return self._fake(result, device)

    def _join(self, tensors: Any, dim: int = 0, *, device: torch.device) -> Tensor:
        """Concatenate tensors without PyTorch's function for meta tensors, which checks each of
        them."""
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        with in_kernel_invocation_manager(self):
            joined = torch.empty(shape, dtype=tensors[0].dtype, device=META)
        return self._fake(joined, device)

    def _device_of_result(
        self, func: Any, args: Any, kwargs: Any
    ) -> torch.device | None:
        """Device of an operator's results; None if it cannot run directly."""
        if func not in self._direct:
            self._direct[func] = (
                func.namespace == "aten" and func.is_view
            ) or func._schema.name in DIRECT
        if not self._direct[func]:
            return None
        device = kwargs.get("device") if kwargs else None
        first = args[0] if args else None
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, Tensor):
            if type(first) is not FakeTensor or first.constant is not None:
                return None
            device = device or first.fake_device
        return None if device is None else torch.device(device)

    def _fake(self, result: Any, device: torch.device) -> Any:
        if not isinstance(result, Tensor) or isinstance(result, FakeTensor):
            return result
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, result, device)
            self._attributes[device] = dict(vars(first))
            return first
        # As the constructor does, which takes longer to check its arguments.
        fake = Tensor._make_subclass(
            FakeTensor,
            result,
            result.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """Make every tensor fake."""
    data = Tensor.data
    make_subclass = Tensor._make_subclass
    storage_address = torch.UntypedStorage.data_ptr
    tensor_address = Tensor.data_ptr

    def make_alike(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Autograd replaces data only by data of the same backend, and treats the fake device as
        # another one.
        if cls is FakeTensor and device_type != "cpu":
            kwargs["device_for_backend_keys"] = torch.device(device_type, 0)
        return make_subclass(cls, *args, **kwargs)

    def set_data(tensor: Tensor, new: Tensor) -> None:
        data.__set__(tensor, new)  # type: ignore[attr-defined]
        if isinstance(tensor, FakeTensor) and isinstance(new, FakeTensor):
            tensor.fake_device = new.fake_device

    def address_of_storage(storage: torch.UntypedStorage) -> int:
        return (
            storage._cdata * bool(storage.nbytes())
            if storage.device.type == "meta"
            else storage_address(storage)
        )

    def address(tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return tensor_address(tensor)
        return (
            address_of_storage(tensor.untyped_storage())
            + int(tensor.storage_offset()) * tensor.element_size()
        )

    replacements: list[tuple[Any, str, Any]] = [
        (Tensor, "_make_subclass", staticmethod(make_alike)),
        (Tensor, "data", property(data.__get__, set_data)),  # type: ignore[attr-defined]
        (torch.UntypedStorage, "data_ptr", address_of_storage),
        (Tensor, "data_ptr", address),
        (nn.Module, "_apply", _apply),
        (torch, "Generator", _Generator),
        (torch, "chunk", repeating_chunks(torch.chunk)),
        (torch.accelerator, "set_device_index", lambda device: None),
        (torch.accelerator, "current_stream", MODULE.current_stream),
        # The other ranks do not exist.
        (ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        (dist.Reducer, "_rebuild_buckets", lambda reducer: False),
        (
            ddp.DistributedDataParallel,
            "_ddp_init_helper",
            _with_buckets(ddp.DistributedDataParallel._ddp_init_helper),
        ),
    ]
    # Meshes read their rank numbers.
    replacements += [
        (owner, name, _really(getattr(owner, name)))
        for owner, name in (
            (DeviceMesh, "__init__"),
            (DeviceMesh, "__getitem__"),
            (device_mesh, "named_mesh"),
            (device_mesh, "tensor_axis_first"),
        )
    ]
    # Compares values of its own
    replacements.append((adapter, "find_form", _really(adapter.find_form)))
    if device_type != "cpu":
        replacements += fsdp1_streams()
    if hasattr(_fsdp_param, "_chunk_with_empty"):
        replacements.append((_fsdp_param, "_chunk_with_empty", Chunks))
    with replaced(*replacements), _FakeMode(allow_non_fake_inputs=True):
        yield


class Chunks:
    """Chunks of a parameter, made when asked for: FSDP2 makes one for each of a thousand shards,
    and takes two."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        total = self._tensor.shape[self._dim]
        if start >= total:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, total - start))


def _are_many_alike(tensors: Sequence[Tensor]) -> bool:
    return (
        len(tensors) >= MANY
        and len({(tensor.ndim, tensor.dtype) for tensor in tensors}) == 1
    )


def repeating_chunks(chunk: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.chunk``. Many chunks are one tensor if no gradient is taken.

    FSDP2 cuts a parameter that is not sharded along its first dim into a chunk for each shard, and
    joins them along another: with 256 shards half of the time of a trace.
    """

    def call(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
        if (
            type(tensor) is not FakeTensor
            or chunks < MANY
            or not tensor.shape[dim]
            or torch.is_grad_enabled()
        ):
            return chunk(tensor, chunks, dim)
        size = tensor.shape[dim]
        length = -(-size // chunks)
        count, rest = divmod(size, length)
        last = [tensor.narrow(dim, size - rest, rest)] * (rest > 0)
        return (*[tensor.narrow(dim, 0, length)] * count, *last)

    return call


def _with_buckets(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let DDP start with the buckets that it builds after its first step; it sizes the first ones
    by sys.maxsize."""

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


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """``nn.Module._apply``, which cannot replace one fake tensor by another."""
    for child in module.children() if recurse else ():
        child._apply(function)
    with torch.no_grad():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(
                    function(param), requires_grad=param.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module
