"""Copies between host and device that overlap with compute.

An accelerator has a stream for each direction, made once: each new stream would grow its own pool
of the allocator. Only events order them, so every copy names the events that it must follow. Host
memory is pinned, or the copies would not be asynchronous; PyTorch's allocator rounds a pinned
tensor up to a power of two bytes. On a CPU each copy is done when the call returns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdptoys.device import Device, Event, Stream, in_host_place


class Transfers:
    """Synchronous copies, for a CPU."""

    def __init__(self, device: Device) -> None:
        self.device = device.torch_device

    def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory for asynchronous copies."""
        return in_host_place(torch.zeros(elements, dtype=dtype))

    def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized device memory for copies in both directions; it must live as long as this
        object."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def load(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy from host to device after all events of ``after``; return the event of its end."""
        target.copy_(source)

    def store(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy from device to host after all events of ``after``; return the event of its end."""
        target.copy_(source)

    def mark(self) -> Event:
        """Record an event on the compute stream."""

    def wait(self, event: Event) -> None:
        """Make later work on the compute stream wait for an event."""

    def wait_on_host(self, event: Event) -> None:
        """Block until an event is done."""


class StreamTransfers(Transfers):
    """Copies on two side streams of an accelerator."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._streams = device.streams
        self._load_stream = self._streams.new()
        self._store_stream = self._streams.new()

    def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory."""
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the compute stream that is not reused before copies on it are done."""
        tensor = super().device_tensor(elements, dtype)
        tensor.record_stream(self._load_stream)
        tensor.record_stream(self._store_stream)
        return tensor

    def load(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy on the load stream."""
        return self._copy(self._load_stream, target, source, after)

    def store(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy on the store stream."""
        return self._copy(self._store_stream, target, source, after)

    def mark(self) -> Event:
        """Record an event on the current stream."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def wait(self, event: Event) -> None:
        """Make the current stream wait."""
        if event is not None:
            self._streams.current().wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Block this thread."""
        if event is not None:
            event.synchronize()

    def _copy(
        self, stream: Stream, target: Tensor, source: Tensor, after: Sequence[Event]
    ) -> Event:
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with self._streams.on(stream):
            target.copy_(source, non_blocking=True)
            return self.mark()
