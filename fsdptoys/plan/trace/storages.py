"""Live storages, their blocks of device memory, and the purposes of these.

A block starts when a storage is first seen; it ends with the last reference to the storage, or when
FSDP resizes the storage to zero. A block's purpose is usually known only later: categories are
collected during the run, and the most certain one wins.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptoys.device import MemoryStats
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.events import Alloc, Event, Free, RecordStream, Trace

# Rounding of allocators, for the count of ``memory`` only; a trace has the requested sizes
ALIGNMENT = 512

_CERTAINTY = (
    "temporary exchange_buffers activations gathered_parameters reduction_buffers logits buffers "
    "optimizer_states gradients parameters"
)
"""Categories of a block, later ones more certain."""
_RANK = {Category[name]: rank for rank, name in enumerate(_CERTAINTY.split())}


@dataclass(slots=True)
class Storage:
    """A live storage."""

    bytes: int
    on_device: bool
    block: int = 0
    pinned: bool = False
    reference: Any = None


class _Replaced(NamedTuple):
    """A gradient to which autograd has added another one, out of place."""

    old: int
    new: Storage
    alloc: int  # Index of the new storage's ``Alloc`` event
    events: int
    peak: int


class Storages:
    """Follows storages and writes ``Alloc`` and ``Free``."""

    def __init__(
        self, device_type: str, events: list[Event], stream: Callable[[], int]
    ) -> None:
        self._device_type = device_type
        self._events = events
        self._stream = stream
        self.phase = "construction"
        self.region: Category | None = None  # Purpose of all later allocations
        self.recording = True
        self.host_bytes = 0
        self.blocks = 0
        self._live: dict[int, Storage] = {}
        self._categories: dict[int, Category] = {}
        self._of_forward: set[int] = set()
        self._allocated = self._peak = 0
        self._replaced: _Replaced | None = None

    def find(self, tensor: Tensor) -> Storage | None:
        """A tensor's storage, if it was seen."""
        shard = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return self._live.get(shard.untyped_storage()._cdata)

    def see(self, tensor: Tensor) -> Storage:
        """A tensor's storage; a new one starts a block."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        live = self._live.get(key)
        if live is None:
            on_device = tensor.device.type == self._device_type
            # Meta tensors of a trace on another device, such as a model before its initialization,
            # have no memory.
            live = Storage(
                0
                if tensor.device.type == "meta" and not on_device
                else storage.nbytes(),
                on_device,
            )
            live.reference = weakref.ref(storage, functools.partial(self._forget, key))
            self._live[key] = live
            self.begin(live)
        return live

    def begin(self, storage: Storage) -> None:
        """Allocate a storage's memory."""
        if not storage.on_device:
            self.host_bytes += storage.bytes
        elif storage.bytes:
            self.blocks += 1
            block = storage.block = self.blocks
            recomputed = self.phase == "backward" and _recomputes()
            category = self.region or (
                Category.activations if recomputed else Category.temporary
            )
            self._add(Alloc(block, storage.bytes, self._stream(), category))
            self._categories[block] = category
            if self.phase == "forward":
                self._of_forward.add(block)
            self._allocated += _round(storage.bytes)
            self._peak = max(self._peak, self._allocated)

    def end(self, storage: Storage) -> None:
        """Free a storage's memory."""
        if not storage.on_device:
            self.host_bytes -= storage.bytes
        elif storage.bytes:
            self._add(Free(storage.block))
            self._of_forward.discard(storage.block)
            self._allocated -= _round(storage.bytes)

    def scratch(self, sizes: Iterable[int]) -> None:
        """Allocate and free a kernel's temporary memory."""
        blocks = [Storage(size, True) for size in sizes]
        for change in (self.begin, self.end):
            for storage in blocks:
                change(storage)

    def resize(self, key: int, size: int) -> None:
        """Resize a storage, as only FSDP does with gathered parameters."""
        storage = self._live.get(key)
        if storage is None or storage.bytes == size:
            return
        self.end(storage)
        self._categorize_storage(storage, Category.gathered_parameters)
        storage.bytes = size
        self.begin(storage)
        self._categorize_storage(storage, Category.gathered_parameters)

    def begin_phase(self, phase: str) -> None:
        """Start a phase, or a forward or backward within one.

        Live blocks of the forward are activations when the backward starts.
        """
        if phase == "backward":
            for block in self._of_forward:
                self._categorize(block, Category.activations)
        if phase == "forward":
            self._of_forward.clear()
        self.phase = phase

    def categorize(self, tensor: Tensor, category: Category) -> None:
        """Set the purpose of a tensor."""
        if (storage := self.find(tensor)) is not None:
            self._categorize_storage(storage, category)

    def mark_sum(self, old: Tensor, result: Tensor, alloc: int, peak: int) -> None:
        """Note that autograd added to ``old`` out of place; if that gradient ends now, its block
        continues."""
        new = self.find(result)
        if new is not None and new.on_device and new.bytes:
            self._replaced = _Replaced(
                old.untyped_storage()._cdata, new, alloc, len(self._events), peak
            )

    def memory(self) -> MemoryStats:
        """Allocated memory; nothing is reserved here, so the peak stands for it."""
        return MemoryStats(self._allocated, self._peak, self._peak)

    def finish(self, trace: Trace) -> None:
        """Give a trace the categories that became known after the blocks."""
        purposes = {
            "all-gather": Category.gathered_parameters,
            "reduce": Category.reduction_buffers,
        }
        streams = trace.streams.items()
        by_stream = {
            number: purposes[word]
            for number, purpose in streams
            for word in purposes
            if word in purpose
        }
        transfers = {
            number for number, purpose in streams if purpose in ("load", "store")
        }
        for event in trace.events:
            if isinstance(event, Alloc) and event.stream in by_stream:
                self._categorize(event.block, by_stream[event.stream])
            elif isinstance(event, RecordStream) and event.stream in transfers:
                self._categorize(event.block, Category.optimizer_states)
        for event in trace.events:
            if (
                isinstance(event, Alloc)
                and (category := self._categories[event.block]) is not event.category
            ):
                trace.categories[event.block] = category

    def _forget(self, key: int, _: object) -> None:
        storage = self._live.pop(key)
        replaced = self._replaced
        if (
            replaced is None
            or key != replaced.old
            or len(self._events) != replaced.events
            or not self.recording
        ):
            self.end(storage)
            return
        # Undo the new allocation.
        del self._events[replaced.alloc]
        self._replaced = None
        self._of_forward.discard(replaced.new.block)
        self._allocated -= _round(replaced.new.bytes)
        self._peak = replaced.peak
        replaced.new.block = storage.block

    def _categorize_storage(self, storage: Storage, category: Category) -> None:
        if storage.on_device and storage.bytes:
            self._categorize(storage.block, category)

    def _categorize(self, block: int, category: Category) -> None:
        if _RANK[category] > _RANK[self._categories.get(block, Category.temporary)]:
            self._categories[block] = category

    def _add(self, event: Event) -> None:
        if self.recording:
            self._events.append(event)


def _round(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _recomputes() -> bool:
    """Whether activation checkpointing recomputes a forward, which it does under saved-tensor
    hooks.

    Asks a private function, tested with torch 2.7.1 and 2.13; without it recomputation counts as
    temporary.
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(False) is not None
