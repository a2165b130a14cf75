"""Copies between host and device that run beside what the device computes.

An accelerator has a stream for each direction, made once: streams that come and go would each grow a pool of the
allocator. What orders them is events alone, so every copy names the events that it must come after. Host memory is
pinned, or the copies would not be asynchronous; PyTorch's allocator rounds a pinned tensor up to a power of two bytes.
A CPU has nothing to overlap: there each copy is done when the call returns, in the order in which the calls come.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdptoys.device import Device, Event, Stream


class Transfers:
    """The plain form: copies that are done at once."""

    def __init__(self, device: Device) -> None:
        self.device = device.torch_device

    def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that copies can reach beside computation."""
        return torch.zeros(elements, dtype=dtype)

    def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory on the device that copies of both directions may use; it must live as long as this."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def load(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy from host to device once all of ``after`` have happened; return the event of its end."""
        target.copy_(source)

    def store(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy from device to host once all of ``after`` have happened; return the event of its end."""
        target.copy_(source)

    def mark(self) -> Event:
        """An event that happens when all that was given to the computing stream so far is done."""

    def wait(self, event: Event) -> None:
        """Let what is given to the computing stream from now on come after an event."""

    def wait_on_host(self, event: Event) -> None:
        """Return once an event has happened."""


class StreamTransfers(Transfers):
    """The accelerator's form."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._streams = device.streams
        self._load_stream, self._store_stream = self._streams.new(), self._streams.new()

    def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory."""
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the computing stream that is not given to others before the copies on it are done."""
        made = super().device_tensor(elements, dtype)
        made.record_stream(self._load_stream)
        made.record_stream(self._store_stream)
        return made

    def load(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy on the loading stream."""
        return self._copy(self._load_stream, target, source, after)

    def store(self, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy on the storing stream."""
        return self._copy(self._store_stream, target, source, after)

    def mark(self) -> Event:
        """An event on the stream that is current."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def wait(self, event: Event) -> None:
        """Let the stream that is current wait."""
        if event is not None:
            self._streams.current().wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Block this thread."""
        if event is not None:
            event.synchronize()

    def _copy(self, stream: Stream, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with self._streams.on(stream):
            target.copy_(source, non_blocking=True)
            event = self._streams.event()
            event.record(stream)
        return event


def transfers_for(device: Device) -> Transfers:
    """The form that a device has."""
    return StreamTransfers(device) if device.is_accelerator else Transfers(device)
