"""Signal handlers for the length of a block."""

import contextlib
import signal
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def handle_signals(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Install handlers by signal number, and restore the previous ones; main thread only."""
    before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
