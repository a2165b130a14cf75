"""Activation offload: tensors that checkpointed blocks save for the backward live in host memory.

Under gradient checkpointing a block saves its input, and with ``selective`` the results of some
operators. A side stream copies them into pinned host memory during the block's forward, and their
device memory is freed one block later. In the backward, a block's request for its first tensor
starts the copies of the block before it. Streams wait for events, the host for nothing. About two
blocks' worth stays on the device; the price is two copies over PCIe a step.

On the device stay parameters, tensors without gradients, small ones or with gaps, and those of the
last checkpointed block, which the backward needs at once. Host buffers are reused over steps; their
sizes are powers of two, to which PyTorch's pinned allocator rounds anyway.

Not covered: tensors other than inputs that a compiled block saves. Writing to kept results in place
is refused.
Sources: https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc;
arXiv:1602.08124 (offload with prefetch); arXiv:2104.07857 (offload of checkpoints).
"""

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fsdptoys.device import Streams, in_host_place, is_accelerator

MIN_BYTES = 2**18
"""Smaller tensors stay on the device: starting a copy takes as long as copying about 256 KiB."""


class Copies:
    """Copies between a device and the host: on a CPU, done on return."""

    def empty_host(self, nbytes: int) -> Tensor:
        """A new host buffer, uint8."""
        return in_host_place(torch.empty(nbytes, dtype=torch.uint8))

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy after earlier work on the current stream; returns a mark for ``wait``."""
        target.copy_(source)

    def wait(self, mark: Any) -> None:
        """Make the current stream wait until the copy is done."""

    def abandon(self, tensor: Tensor) -> None:
        """Keep the memory of a device tensor that will not be waited for until its copy is done."""


class StreamCopies(Copies):
    """Copies on one side stream of an accelerator, in order: a host buffer may be reused before its
    last copy ends."""

    def __init__(self, device: torch.device) -> None:
        self._streams = Streams(device)
        self._stream = self._streams.new()

    def empty_host(self, nbytes: int) -> Tensor:
        """A pinned buffer."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy on the side stream."""
        self._stream.wait_stream(self._streams.current())
        with self._streams.on(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Make the current stream wait."""
        self._streams.current().wait_event(mark)

    def abandon(self, tensor: Tensor) -> None:
        """Record the side stream as a user of the tensor."""
        tensor.record_stream(self._stream)


class _Block:
    """Saved tensors of one call of a checkpointed block, in the order in which the backward needs
    them."""

    def __init__(
        self, index: int, previous: "_Block | None", args: tuple[Any, ...], stays: bool
    ) -> None:
        self.index = index
        self.previous = previous
        self.stays = stays
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        self.input_addresses = {tensor.data_ptr() for tensor in inputs}
        self.saved: list[weakref.ref[_Saved]] = []

    def start_return(self) -> None:
        for saved in self._alive():
            saved.start_return()

    def leave(self) -> None:
        for saved in self._alive():
            saved.leave()

    def _alive(self) -> Iterator["_Saved"]:
        return (saved for ref in self.saved if (saved := ref()) is not None)


class _Saved:
    """One saved tensor of a block: on the device, in host memory, or in flight.

    Lives as long as the backward may need it, which it may several times with ``retain_graph``.
    """

    def __init__(
        self, tensor: Tensor, block: _Block, offload: "ActivationOffload"
    ) -> None:
        self._block = block
        self._offload = offload
        self._shape = tensor.shape
        self._strides = tensor.stride()
        self._dtype = tensor.dtype
        self._resident: Tensor | None = tensor
        self._version = tensor._version
        self._buffer: Tensor | None = None
        block.saved.append(weakref.ref(self))
        if not block.stays:
            self._buffer = offload.take_buffer(tensor.nbytes)
            self._mark = offload.copies.start(self._host(), tensor)

    def get(self) -> Tensor:
        """The tensor, for the backward; the first of a block starts the copies of the block
        before."""
        if self._block.saved[0]() is self:
            self._block.start_return()
            if self._block.previous is not None:
                self._block.previous.start_return()
        self.start_return()
        tensor = self._resident
        assert tensor is not None
        self.leave()
        return tensor

    def start_return(self) -> None:
        """Start the copy to the device, unless the tensor is there or in flight."""
        if self._resident is None:
            # Memory of the current stream, which the copy waits for, so its earlier use has ended.
            tensor = torch.empty_strided(
                self._shape,
                self._strides,
                dtype=self._dtype,
                device=self._offload.device,
            )
            self._mark = self._offload.copies.start(tensor, self._host())
            self._resident = tensor
            self._version = tensor._version

    def leave(self) -> None:
        """Free the device memory after the copy, in the order of the current stream."""
        if self._resident is None:
            return
        if self._resident._version != self._version:
            raise RuntimeError(
                "a tensor that a checkpointed block saved was written to in place before its "
                "backward"
            )
        if self._buffer is not None:
            self._offload.copies.wait(self._mark)
            self._resident = None

    def _host(self) -> Tensor:
        assert self._buffer is not None
        # With the tensor's strides, so that a copy is one run of bytes.
        flat = self._buffer[: self._shape.numel() * self._dtype.itemsize].view(
            self._dtype
        )
        return flat.as_strided(self._shape, self._strides)

    def __del__(self) -> None:
        if self._buffer is not None:
            if self._resident is not None:
                self._offload.copies.abandon(self._resident)
            self._offload.give_back_buffer(self._buffer)


class ActivationOffload:
    """Offloads saved tensors of at least ``min_bytes`` of the checkpointed blocks of one model."""

    def __init__(
        self,
        device: torch.device,
        *,
        min_bytes: int = MIN_BYTES,
        copies: Copies | None = None,
    ) -> None:
        self.device = device
        self.copies = copies or (
            StreamCopies(device) if is_accelerator(device) else Copies()
        )
        self._min_bytes = min_bytes
        self._latest: _Block | None = None
        self._idle: dict[int, list[Tensor]] = defaultdict(list)

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        index: int,
        is_last: bool,
        operators: Collection[object] = (),
    ) -> Any:
        """``torch.utils.checkpoint.checkpoint(function, *args)`` with saved tensors offloaded.

        Args:
            index: of the block among the checkpointed ones, in the order of the forward.
            is_last: whether it is the last checkpointed block; its tensors stay on the device.
            operators: their results are saved rather than recomputed.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        block = self._begin(index, args, is_last)

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return (
                self._save(_alias(tensor), block)
                if tensor.data_ptr() in block.input_addresses
                else tensor
            )

        def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            results: dict[object, list[Any]] = defaultdict(list)
            return _Keep(
                operators, results, functools.partial(self._save, block=block)
            ), _Replay(results)

        options: dict[str, Any] = {"context_fn": contexts} if operators else {}
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, *args, use_reentrant=False, **options)

    def take_buffer(self, nbytes: int) -> Tensor:
        """A host buffer of at least ``nbytes``, uint8."""
        size = 1 << max(0, nbytes - 1).bit_length()
        idle = self._idle[size]
        return idle.pop() if idle else self.copies.empty_host(size)

    def give_back_buffer(self, buffer: Tensor) -> None:
        """Return a buffer for reuse."""
        self._idle[buffer.numel()].append(buffer)

    def _begin(self, index: int, args: tuple[Any, ...], is_last: bool) -> _Block:
        """Begin a call of a block; tensors of the calls before the latest leave the device."""
        latest = self._latest
        same_forward = latest is not None and latest.index < index
        if latest is not None:
            for block in (latest.previous, None if same_forward else latest):
                if block is not None:
                    block.leave()
        self._latest = _Block(index, latest if same_forward else None, args, is_last)
        return self._latest

    def _save(self, tensor: Tensor, block: _Block) -> Tensor | _Saved:
        travels = (
            not isinstance(
                tensor if tensor._base is None else tensor._base, nn.Parameter
            )
            and not is_traceable_wrapper_subclass(tensor)
            and tensor.device.type == self.device.type
            and _is_dense(tensor)
            and tensor.nbytes >= self._min_bytes
        )
        return _Saved(tensor, block, self) if travels else tensor


class _Keep(TorchDispatchMode):
    """Saves the results of some operators, in the forward."""

    def __init__(
        self,
        operators: Collection[object],
        results: dict[object, list[Any]],
        save: Callable[[Tensor], Tensor | _Saved],
    ) -> None:
        super().__init__()
        self._operators = frozenset(operators)
        self._results = results
        self._save = save

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._results[func].append(
                tree_map(
                    lambda result: (
                        self._save(_alias(result))
                        if isinstance(result, Tensor)
                        else result
                    ),
                    results,
                )
            )
        return results


class _Replay(TorchDispatchMode):
    """Returns saved results instead of computing them, in the recomputation."""

    def __init__(self, results: dict[object, list[Any]]) -> None:
        super().__init__()
        self._results = results
        self._calls: Counter[object] = Counter()

    def __enter__(self) -> "_Replay":
        self._calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in self._results:
            return func(*args, **(kwargs or {}))
        call = self._calls[func]
        self._calls[func] += 1
        return tree_map(
            lambda result: _alias(_unpack(result)), self._results[func][call]
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, in any order of dims; attention returns
    transposed tensors."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _unpack(saved: Any) -> Any:
    return saved.get() if isinstance(saved, _Saved) else saved


def _alias(tensor: Any) -> Any:
    """An alias with a tensor's memory and version, without its graph; non-tensors are returned as
    they are.

    Below autograd ``detach`` gives the alias its own version unless this dispatch key is excluded,
    as in PyTorch's selective checkpointing (private; tried with torch 2.7 and 2.13).
    """
    if not isinstance(tensor, Tensor):
        return tensor
    with torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    ):
        return tensor.detach()
