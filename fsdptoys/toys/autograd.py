"""Callbacks of autograd's engine."""

from collections.abc import Callable

import torch


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has reached all leaves; no public API does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
