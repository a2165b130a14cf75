"""Streams and events of an accelerator, from its module (``torch.cuda``, ``torch.npu``)."""

from contextlib import AbstractContextManager
from typing import Any

import torch

Stream = Any  # A stream of the device's module; CUDA's and NPU's have the same methods

Event = Any  # An event of the device's module; None for nothing to wait for


class Streams:
    """Creates streams and events of one accelerator, whose device has an index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def new(self) -> Stream:
        """A new stream; create few and keep them, since each has its own pool in the allocator."""
        return self._module.Stream(device=self._device)

    def event(self) -> Event:
        """An event without timing."""
        return self._module.Event()

    def current(self) -> Stream:
        """This thread's current stream."""
        return self._module.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which a stream is current."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has streams and memory of its own."""
    return device.type != "cpu"
