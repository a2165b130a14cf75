"""Bytes that tensors hold on a CPU, counted block by block over one step.

PyTorch's allocator for CPUs keeps no statistics, but reports each block to a profiler that asks for
memory. Such a profiler without any operator in its scopes costs a fraction of a microsecond a block
while the step runs, and several microseconds a block afterwards, when its records are read: cheap
enough for some steps, not for every one (``train.step_memory`` chooses the steps). It sees the
allocations of this thread and of those that work for it with its thread-local state (autograd,
gloo), within kernels and compiled code too. A dispatch mode would see tensors only at the borders
of operators and none of compiled code, and slows the step itself; glibc's ``mallinfo2`` counts
Python's memory too, and has no peak.

Blocks from before the step are those of the storages that the garbage collector finds and that
PyTorch allocated: those with a purpose, and others that can still be resized, unlike those with a
NumPy array. The allocator does not report their end, so a weak reference to each allocates a
*mark*: a block that says when by its place among the records. Sizes are the requested ones, not
rounded up.

On a CPU the device and the host are the same memory. Tensors that offloading keeps in the host's
place are counted apart, so that ``allocated`` has the bytes that a device would hold.

A block that an unrecorded thread frees (gloo's may hold the last reference to a buffer of a
collective) counts until its address is reused or the count ends.

Not counted: blocks that other threads allocate (loading of batches, optimizer workers), which are
the host's on a device too; tensors that no Python object held when the step began; scratch memory
of oneDNN and MKL.
"""

import ctypes
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from fsdptoys.utils.storages import storages_of

REST = "rest"
"""Purpose of blocks without a label: activations, gathered parameters, buffers, temporaries."""

_prepared: set[int] = set()
"""Processes whose profiler has been prepared before."""
_with_purpose: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()
_host: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


_host_lock = threading.Lock()


def in_host_place(tensor: Tensor) -> Tensor:
    """Count a CPU tensor as host memory, as a copy that offloading keeps; returns it."""
    with _host_lock:
        _host.add(tensor.untyped_storage())
    return tensor


class HostMemory(TorchDispatchMode):
    """Counts the CPU tensors that this thread makes as host memory: those of a background save,
    libraries' too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor and leaf.device.type == "cpu":
                in_host_place(leaf)
        return result


class UncountableError(RuntimeError):
    """This PyTorch's profiler has other functions than those tried."""


class CountedBytes(NamedTuple):
    """Bytes of one step."""

    before_bytes: int
    """Held before the step, without the host's."""
    end_bytes: int
    """Held after the step, without the host's."""
    peak_bytes: int
    """Most held at once, without the host's."""
    at_peak: dict[str, int]
    """Purpose → bytes at the peak."""
    host_bytes: int
    """Held after the step in the host's place."""


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    recorded: bool  # Whether the allocator reports its end
    purpose: str = REST
    on_host: bool = False


class AllocationCount:
    """Counts the blocks of this thread from construction to ``finish``; one at a time, and not
    under a profiler.

    Args:
        labels: purpose → tensors that have it now.
        host_purposes: purposes of tensors in the host's place.

    Raises:
        UncountableError: if this PyTorch cannot record blocks.
    """

    def __init__(
        self, labels: Mapping[str, Iterable[Tensor]], host_purposes: Iterable[str] = ()
    ) -> None:
        self._host_purposes = frozenset(host_purposes)
        self._marks: dict[int, Callable[[], None]] = {}
        self._mark_storages: list[torch.UntypedStorage] = []
        self._live: dict[int, _Block] = {}
        self._changes: list[tuple[_Block, bool]] = []
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []
        addresses = _addresses(labels)
        for address, storage in _live_storages().items():
            self._live[address] = _Block(storage.nbytes(), recorded=False)
            self._ends.append(
                weakref.ref(storage, functools.partial(self._mark_end, address))
            )
        self._before = list(self._live.values())
        self._label_now(addresses)
        self._restore = _start_recording()

    def label(self, labels: Mapping[str, Iterable[Tensor]]) -> None:
        """Label the blocks of tensors that have a purpose now; a block keeps its first label."""
        self._mark(functools.partial(self._label_now, _addresses(labels)))

    def finish(self, labels: Mapping[str, Iterable[Tensor]]) -> CountedBytes:
        """End the count; ``labels`` are those of the end."""
        records = self.cancel()
        for record in records:
            self._replay(record.ptr, record.alloc_size)
        self._label_now(_addresses(labels))
        before = sum(block.size for block in self._before if not block.on_host)
        current = peak = before
        at_peak = 0
        for index, (block, begins) in enumerate(self._changes):
            if not block.on_host:
                current += block.size if begins else -block.size
                if current > peak:
                    peak = current
                    at_peak = index + 1
        blocks = dict.fromkeys(self._before)
        for block, begins in self._changes[:at_peak]:
            if begins:
                blocks[block] = None
            else:
                blocks.pop(block)
        purposes: dict[str, int] = {}
        for block in blocks:
            if not block.on_host:
                purposes[block.purpose] = purposes.get(block.purpose, 0) + block.size
        on_host = sum(block.size for block in self._live.values() if block.on_host)
        return CountedBytes(before, current, peak, purposes, on_host)

    def cancel(self) -> list[Any]:
        """Stop recording; returns the records."""
        self._ends.clear()
        try:
            return _stop_recording()
        finally:
            self._restore()

    def _mark_end(self, address: int, _: object) -> None:
        self._mark(functools.partial(self._end, address))

    def _mark(self, action: Callable[[], None]) -> None:
        # A storage without a tensor: allocated past the dispatcher, whatever modes are active.
        mark = torch.UntypedStorage(1)
        self._mark_storages.append(mark)
        self._marks[mark.data_ptr()] = action

    def _replay(self, address: int, size: int) -> None:
        if (action := self._marks.get(address)) is not None:
            action()
        elif size > 0:
            # a thread that is not recorded freed the block that was here
            self._end(address)
            block = self._live[address] = _Block(size, recorded=True)
            self._changes.append((block, True))
        elif (live := self._live.get(address)) is not None and live.recorded:
            self._end(address)

    def _end(self, address: int) -> None:
        if (block := self._live.pop(address, None)) is not None:
            self._changes.append((block, False))

    def _label_now(self, addresses: Mapping[str, Iterable[int]]) -> None:
        for purpose, of_purpose in addresses.items():
            for address in of_purpose:
                block = self._live.get(address)
                if block is not None and block.purpose == REST:
                    block.purpose = purpose
                    block.on_host |= purpose in self._host_purposes
        with _host_lock:
            on_host = list(_host)
        for storage in on_host:
            if storage.device.type != "cpu":  # a fake tensor's
                continue
            if (block := self._live.get(storage.data_ptr())) is not None:
                block.on_host = True


def _addresses(labels: Mapping[str, Iterable[Tensor]]) -> dict[str, list[int]]:
    addresses: dict[str, list[int]] = {}
    for purpose, tensors in labels.items():
        storages = storages_of(tensors).values()
        _with_purpose.update(storages)
        addresses[purpose] = [storage.data_ptr() for storage in storages]
    return addresses


def _live_storages() -> dict[int, torch.UntypedStorage]:
    """Return address → storage, of all that Python objects hold and PyTorch's allocator for CPUs
    made."""
    storages: dict[int, torch.UntypedStorage] = {}
    for object_ in gc.get_objects():
        # Not isinstance, which asks objects for a class of their own making.
        if (
            not issubclass(type(object_), Tensor)
            or is_traceable_wrapper_subclass(object_)
            or object_.layout != torch.strided
        ):
            continue
        storage = object_.untyped_storage()
        # not NumPy's memory, nor a file
        is_ours = storage in _with_purpose or storage.resizable()
        if storage.device.type == "cpu" and storage.nbytes() and is_ours:
            storages[storage.data_ptr()] = storage
    return storages


def profiler_is_on() -> bool:
    """Return whether torch.profiler records this thread, within which nothing can be counted."""
    return torch._C._autograd._profiler_enabled()


def _start_recording() -> Callable[[], None]:
    """Record the blocks of this thread; returns the function that ends the silence of the
    allocator.

    Private functions of torch.profiler, tried with torch 2.13. Its public class records operators
    too.
    """
    # read once; else each start and stop prints a line
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    restore = _silence_allocator()
    try:
        private = torch._C._profiler
        autograd = torch._C._autograd
        config = private.ProfilerConfig(
            private.ProfilerState.KINETO,
            False,  # Shapes
            True,  # Memory
            False,  # Stacks
            False,  # FLOPs
            False,  # Modules
            private._ExperimentalConfig(),
        )
        activities = {private.ProfilerActivity.CPU}
        # one in which nothing happens
        scopes = {private.RecordScope.KERNEL_FUNCTION_DTYPE}
        _ = private._ExtraFields_Allocation, autograd._disable_profiler
        with _discarded_stderr() if os.getpid() not in _prepared else nullcontext():
            autograd._prepare_profiler(config, activities)
        _prepared.add(os.getpid())
        enable: Any = autograd._enable_profiler  # its stub lacks the scopes
        enable(config, activities, scopes)
    except (AttributeError, TypeError, RuntimeError) as error:
        restore()
        raise UncountableError(
            f"torch {torch.__version__} does not record the blocks of its allocator"
        ) from error
    return restore


def _stop_recording() -> list[Any]:
    """End the recording; returns the records of blocks in their order."""
    from torch._C._autograd import _disable_profiler
    from torch._C._profiler import _ExtraFields_Allocation

    fields = [
        event.extra_fields for event in _disable_profiler().experimental_event_tree()
    ]
    return [
        record
        for record in fields
        if isinstance(record, _ExtraFields_Allocation) and record.device.type == "cpu"
    ]


@contextmanager
def _discarded_stderr() -> Iterator[None]:
    """Discard stderr, to which the first preparation writes if another thread than this one has
    imported torch."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _silence_allocator() -> Callable[[], None]:
    """Silence the warning about blocks from before a recording, if libc10 has the switch; returns
    the undoing."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return lambda: None
    before, level.value = level.value, 2  # errors

    def restore() -> None:
        level.value = before

    return restore
