"""Streams and events of an accelerator, through its own module (``torch.cuda``, ``torch.npu``)."""

from contextlib import AbstractContextManager
from typing import Any

import torch

Stream = Any
"""A stream of the device's module; CUDA's and NPU's have the same methods."""

Event = Any
"""An event of the device's module; None where there is nothing to wait for."""


class Streams:
    """Makes streams and events of one accelerator.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def new(self) -> Stream:
        """A stream beside the computing one; make few and keep them, since each has a pool of the allocator."""
        return self._module.Stream(device=self._device)

    def event(self) -> Event:
        """An event without a time."""
        return self._module.Event()

    def current(self) -> Stream:
        """The stream that this thread's work is given to."""
        return self._module.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Give the work of the body to another stream."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has streams, and memory of its own that pinned host memory is copied to beside computation."""
    return device.type != "cpu"
