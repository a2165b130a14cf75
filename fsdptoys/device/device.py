"""The device of this process, its streams and events, and its peak FLOP/s.

Extends ``torch.accelerator``, which serves CUDA and NPU, so that no other package asks for the type
of hardware. On a CPU device memory is the bytes of tensors, which ``allocations`` counts in some
steps.
"""

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError

from .allocations import CountedBytes
from .host import cpu_name, host_memory_bytes
from .kinds import KINDS
from .presence import device_count, missing_device

Stream = Any  # A stream of the device's module; CUDA's and NPU's have the same methods
Event = Any  # An event of the device's module; None for nothing to wait for


class MemoryStats(NamedTuple):
    """Bytes on a device; of a CPU, as last counted."""

    allocated_bytes: int
    peak_bytes: int  # Highest allocated since the last ``reset_peak_memory``
    reserved_bytes: int | None  # None on a CPU, whose allocator keeps no free memory
    # Purpose → bytes at the peak; None on an accelerator
    at_peak: dict[str, int] | None = None
    host_bytes: int | None = None
    """Held for offloading in place of a host's memory; None on an accelerator."""


class Streams:
    """Creates streams and events of one accelerator; the device needs an index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def new(self) -> Stream:
        """Return a new stream; create few and keep them, since each has its own pool in the
        allocator."""
        return self._module.Stream(device=self._device)

    def event(self, timing: bool = False) -> Event:
        """Return an event, with timing if its ``elapsed_time`` is read."""
        return (
            self._module.Event(enable_timing=True) if timing else self._module.Event()
        )

    def current(self) -> Stream:
        """Return this thread's current stream."""
        return self._module.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which a stream is current."""
        return self._module.stream(stream)


class Device:
    """The device of this process, with ``local_rank`` as index; a ConfigError if this node has
    none."""

    def __init__(self, device_type: str, local_rank: int = 0) -> None:
        self.type = device_type
        if device_type != "cpu":
            devices = device_count(device_type)
            if devices == 0:
                raise missing_device(device_type)
            if local_rank >= devices:
                raise ConfigError(
                    f"local rank {local_rank} needs its own {device_type} device, this machine "
                    f"has {devices}; set launch.nproc_per_node={devices}"
                )
        self.torch_device = (
            torch.device("cpu")
            if device_type == "cpu"
            else torch.device(device_type, local_rank)
        )
        self.backend = KINDS[device_type].backend
        self._counted: MemoryStats | None = None
        self.make_current()

    @property
    def is_accelerator(self) -> bool:
        """Whether the device has streams and memory of its own."""
        return self.type != "cpu"

    @property
    def _module(self) -> Any:
        # torch.accelerator has memory statistics from torch 2.9 on only; torch.cuda and torch.npu
        # always had them.
        return torch.get_device_module(self.type)

    @property
    def name(self) -> str:
        """The maker's name."""
        return device_name(self.type, self.torch_device.index or 0)

    @property
    def peak_flops(self) -> float | None:
        """Return the peak dense bf16 FLOP/s; None if unknown."""
        return peak_flops(self.name) if self.is_accelerator else None

    def supports_bfloat16(self) -> bool:
        """Return whether the device computes in bfloat16, even if slowly."""
        query = getattr(self._module, "is_bf16_supported", None)
        return query is None or bool(query())

    @property
    def bound_device(self) -> torch.device | None:
        """The device for ``init_process_group``, so that the group connects at once and can be
        split.

        None for HCCL, which cannot split: PyTorch 2.13 would refuse a mesh of two axes, and gloo's
        checkpoint group.
        """
        return self.torch_device if KINDS[self.type].splits_groups else None

    @property
    def barrier_devices(self) -> list[int] | None:
        """``device_ids`` of ``dist.barrier``, which guesses the device of an unbound group."""
        return [self.torch_device.index] if self.is_accelerator else None

    # Streams and host memory.

    @property
    def streams(self) -> Streams:
        """Streams and events of an accelerator."""
        return Streams(self.torch_device)

    # pinned memory lets copies from and to the host overlap with computation
    pins_memory = is_accelerator

    def make_current(self) -> None:
        """Make this the thread's current device; a thread starts with device 0, maybe another
        rank's."""
        if self.is_accelerator:
            torch.accelerator.set_device_index(self.torch_device.index)

    def synchronize(self) -> None:
        """Wait for the compute stream, if any; copies on other streams continue, unless it waits
        for them."""
        if self.is_accelerator:
            self.streams.current().synchronize()

    def upload(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor from the host to the device; on a CPU, the tensor itself."""
        if not self.is_accelerator:
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; its values are there after the stream's next event.

        On a CPU, the tensor itself.
        """
        if not self.is_accelerator:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    # Memory.

    @property
    def total_memory_bytes(self) -> int:
        """Return the memory of the device, or of the node for a CPU."""
        if self.is_accelerator:
            return int(
                self._module.get_device_properties(self.torch_device).total_memory
            )
        return host_memory_bytes()

    @property
    def memory_history(self) -> Any:
        """The module of the allocator's history: ``torch.cuda.memory`` or ``torch.npu.memory``."""
        return self._module.memory

    def reset_peak_memory(self) -> None:
        """Reset the peak to the memory in use; a CPU's memory is unknown until it is counted
        again."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats()
        self._counted = None

    @property
    def counts_allocations(self) -> bool:
        """Whether memory is known only after ``record``."""
        return not self.is_accelerator

    def record(self, counted: CountedBytes) -> None:
        """Record the count of a step on a CPU."""
        peak = counted.peak_bytes
        at_peak = counted.at_peak
        if self._counted is not None and self._counted.peak_bytes > peak:
            peak = self._counted.peak_bytes
            at_peak = self._counted.at_peak or {}
        self._counted = MemoryStats(
            counted.end_bytes, peak, None, at_peak, counted.host_bytes
        )

    def memory(self) -> MemoryStats | None:
        """Return the memory of the device; None on a CPU on which nothing was counted since the
        last reset."""
        if not self.is_accelerator:
            return self._counted
        module = self._module
        return MemoryStats(
            module.memory_allocated(),
            module.max_memory_allocated(),
            module.memory_reserved(),
        )

    # Random numbers; ``torch.manual_seed`` seeds the generators of all devices.

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of the device's generator, in host memory; None for a CPU, which has
        PyTorch's default one."""
        return self._module.get_rng_state() if self.is_accelerator else None

    def restore_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore the device's generator, if both device and state have one."""
        if self.is_accelerator and state is not None:
            self._module.set_rng_state(state)


def device_name(device_type: str, index: int = 0) -> str:
    """Return the maker's name of a device, without making it current."""
    if device_type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device_type).get_device_name(index))


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device; None if unknown."""
    if re.search(r"\b(MIG|Laptop)\b", device_name):
        return None
    peaks = {
        part: peak
        for kind in KINDS.values()
        for part, peak in kind.peak_flops.items()
        if re.search(rf"\b{part}\b", device_name)
    }
    return peaks[max(peaks, key=len)] if peaks else None


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has streams and memory of its own."""
    return device.type != "cpu"
