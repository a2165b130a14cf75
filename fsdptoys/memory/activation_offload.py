"""Activation offload: what checkpointed blocks save for the backward waits in host memory.

Under gradient checkpointing a block saves its input, and with ``selective`` the results of some operators. In the
forward they are copied into pinned host memory on a side stream while the block computes, and leave the device one
block later. In the backward a block that asks for its first tensor starts the way back of the block before it, so that
the copies of one block pass beside the recomputation and the backward of another. The host waits for nothing: streams
wait for events. So about two blocks' worth stays on the device, at the price of two copies over PCIe a step; where a
block computes for less time than its copies take, the copies set the pace.

The device keeps parameters, tensors that need no gradient (rotations, which all blocks share), small ones or with gaps,
and all that the last checkpointed block saves, for which the backward asks at once: with two checkpointed blocks there
is nothing to gain. On a CPU the same copies are made, and save nothing.

Buffers in host memory are reused over steps. Their sizes are powers of two, to which PyTorch's pinned allocator rounds
anyway, so that up to half of that memory is idle where a tensor is just larger than one.

Not covered: what a compiled block saves beside its inputs. Writing to kept results in place is refused.
Sources: https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc; arXiv:1602.08124, which offloads
activations and fetches them ahead; arXiv:2104.07857, which offloads those of checkpointing.
"""

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fsdptoys.device import Streams, is_accelerator

MIN_BYTES = 2**18
"""Smaller tensors stay on the device: starting a copy takes as long as copying some 256 KiB."""


class Copies(Protocol):
    """How bytes move between a device and the host."""

    def empty_host(self, nbytes: int) -> Tensor:
        """A new host buffer, uint8."""

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy after what the current stream has been given so far; returns a mark for ``wait``."""

    def wait(self, mark: Any) -> None:
        """Let the current stream wait until the copy is done."""

    def abandon(self, tensor: Tensor) -> None:
        """Keep the memory of a device tensor, which nobody will wait for, until its copy is done."""


class StreamCopies:
    """On one side stream of an accelerator, which lives as long as this object.

    Copies happen in order, so that a host buffer may be given to the next before the one before it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = Streams(device)
        self._stream = self._streams.new()

    def empty_host(self, nbytes: int) -> Tensor:
        """Pinned."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> Any:
        """See ``Copies``."""
        self._stream.wait_stream(self._streams.current())
        with self._streams.on(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """See ``Copies``."""
        self._streams.current().wait_event(mark)

    def abandon(self, tensor: Tensor) -> None:
        """See ``Copies``."""
        tensor.record_stream(self._stream)


class HostCopies:
    """On a CPU: done on return."""

    def empty_host(self, nbytes: int) -> Tensor:
        """Not pinned."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, target: Tensor, source: Tensor) -> None:
        """See ``Copies``."""
        target.copy_(source)

    def wait(self, mark: None) -> None:
        """Nothing to wait for."""

    def abandon(self, tensor: Tensor) -> None:
        """Nothing is under way."""


class _Block:
    """What one call of a checkpointed block saved, in the order in which the backward asks for it.

    Args:
        index: of the block among those that are checkpointed.
        previous: the call before it in the same forward.
        args: of the call.
        stays: whether all of it stays on the device.
    """

    def __init__(self, index: int, previous: "_Block | None", args: tuple[Any, ...], stays: bool) -> None:
        self.index, self.previous, self.stays = index, previous, stays
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        self.input_addresses = {tensor.data_ptr() for tensor in inputs}
        self._saved: list[weakref.ref[_Saved]] = []

    def add(self, saved: "_Saved") -> None:
        self._saved.append(weakref.ref(saved))

    def asks_first(self, saved: "_Saved") -> bool:
        return self._saved[0]() is saved

    def start_return(self) -> None:
        for saved in self._alive():
            saved.start_return()

    def leave(self) -> None:
        for saved in self._alive():
            saved.leave()

    def _alive(self) -> Iterator["_Saved"]:
        return (saved for ref in self._saved if (saved := ref()) is not None)


class _Saved:
    """One tensor that a block saved: on the device, in host memory, or on the way.

    Lives as long as the backward may ask for it. It may do so several times, with ``retain_graph``.
    """

    def __init__(self, tensor: Tensor, block: _Block, offload: "ActivationOffload") -> None:
        self._block, self._offload = block, offload
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._resident: Tensor | None = tensor
        self._version = tensor._version
        self._buffer: Tensor | None = None
        block.add(self)
        if not block.stays:
            self._buffer = offload.take_buffer(tensor.nbytes)
            self._mark = offload.copies.start(self._host(), tensor)

    def get(self) -> Tensor:
        """The tensor, for the backward; the first of a block starts the way back of the block before."""
        if self._block.asks_first(self):
            self._block.start_return()
            if self._block.previous is not None:
                self._block.previous.start_return()
        self.start_return()
        tensor = self._resident
        assert tensor is not None
        self.leave()
        return tensor

    def start_return(self) -> None:
        """Start the way back, unless the tensor is here or on its way."""
        if self._resident is None:
            # Memory of the current stream, which the copy waits for: nothing that was there before is still in use.
            tensor = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._offload.device)
            self._mark = self._offload.copies.start(tensor, self._host())
            self._resident, self._version = tensor, tensor._version

    def leave(self) -> None:
        """Free the device's memory once the copy is done, as far as the current stream is concerned."""
        if self._resident is None:
            return
        if self._resident._version != self._version:
            raise RuntimeError("a tensor that a checkpointed block saved was written to in place before its backward")
        if self._buffer is not None:
            self._offload.copies.wait(self._mark)
            self._resident = None

    def _host(self) -> Tensor:
        assert self._buffer is not None
        # With the strides of the tensor, so that a copy is one run of bytes.
        flat = self._buffer[: self._shape.numel() * self._dtype.itemsize].view(self._dtype)
        return flat.as_strided(self._shape, self._strides)

    def __del__(self) -> None:
        if self._buffer is not None:
            if self._resident is not None:
                self._offload.copies.abandon(self._resident)
            self._offload.give_back_buffer(self._buffer)


class ActivationOffload:
    """Moves what the checkpointed blocks of one model save.

    Args:
        device: on which the model computes.
        min_bytes: smaller tensors stay there.
        copies: how bytes move; by default as the device needs it.
    """

    def __init__(self, device: torch.device, *, min_bytes: int = MIN_BYTES, copies: Copies | None = None) -> None:
        self.device = device
        self.copies = copies or (StreamCopies(device) if is_accelerator(device) else HostCopies())
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
        """``torch.utils.checkpoint.checkpoint(function, *args)``, with what it saves offloaded.

        Args:
            function: forward of a block.
            args: of the forward.
            index: of the block among those that are checkpointed, in the order of the forward.
            is_last: whether no checkpointed block comes after it; what it saves stays on the device.
            operators: whose results are saved rather than computed again.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        block = self._begin(index, args, is_last)

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return self._save(_alias(tensor), block) if tensor.data_ptr() in block.input_addresses else tensor

        def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            kept: dict[object, list[Any]] = defaultdict(list)
            return _Keep(operators, kept, functools.partial(self._save, block=block)), _Replay(kept)

        options: dict[str, Any] = {"context_fn": contexts} if operators else {}
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, *args, use_reentrant=False, **options)

    def take_buffer(self, nbytes: int) -> Tensor:
        """A host buffer of at least so many bytes, uint8."""
        size = 1 << max(0, nbytes - 1).bit_length()
        idle = self._idle[size]
        return idle.pop() if idle else self.copies.empty_host(size)

    def give_back_buffer(self, buffer: Tensor) -> None:
        """Let the next copy have it."""
        self._idle[buffer.numel()].append(buffer)

    def _begin(self, index: int, args: tuple[Any, ...], is_last: bool) -> _Block:
        """A call of a block; what the calls before the latest saved leaves the device."""
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
            not isinstance(tensor, nn.Parameter)
            and not is_traceable_wrapper_subclass(tensor)
            and tensor.device.type == self.device.type
            and _is_dense(tensor)
            and tensor.nbytes >= self._min_bytes
        )
        return _Saved(tensor, block, self) if travels else tensor


class _Keep(TorchDispatchMode):
    """Saves the results of some operators, in the forward."""

    def __init__(
        self, operators: Collection[object], kept: dict[object, list[Any]], save: Callable[[Tensor], Tensor | _Saved]
    ) -> None:
        super().__init__()
        self._operators, self._kept, self._save = frozenset(operators), kept, save

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._kept[func].append(
                tree_map(lambda result: self._save(_alias(result)) if isinstance(result, Tensor) else result, results)
            )
        return results


class _Replay(TorchDispatchMode):
    """Gives saved results instead of computing them, in the recomputation."""

    def __init__(self, kept: dict[object, list[Any]]) -> None:
        super().__init__()
        self._kept = kept
        self._calls: Counter[object] = Counter()

    def __enter__(self) -> "_Replay":
        self._calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._kept:
            return func(*args, **(kwargs or {}))
        call = self._calls[func]
        self._calls[func] += 1
        return tree_map(lambda result: _alias(_unpack(result)), self._kept[func][call])


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whichever order of dims; attention returns transposed tensors."""
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
    """A tensor's memory and version without its history, so as not to hold a graph; what is no tensor, itself.

    Below autograd ``detach`` gives the alias a version of its own unless it is told otherwise, as PyTorch's selective
    checkpointing does too (private; tried on torch 2.7 and 2.13).
    """
    if not isinstance(tensor, Tensor):
        return tensor
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
