"""Callbacks of autograd's engine."""

from collections.abc import Callable

import torch


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the running backward has reached all its leaves; PyTorch has no
    public API."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
