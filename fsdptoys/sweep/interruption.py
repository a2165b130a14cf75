"""Who asks a sweep to end: Ctrl-C, a batch system or a closed terminal, remembered until the sweep looks.

Handlers that only count leave every file of the sweep whole; an exception out of a handler could come anywhere.
"""

import signal
import time
from types import FrameType
from typing import Any

from fsdptoys.signals import SAME_REQUEST_SECONDS

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """Counts the requests to end for as long as it is entered; in the main thread only."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the first signal, or None so far."""
        self.at_once = False
        """Whether there was a second one."""
        self.process: int | None = None
        """Id of the launcher that runs, for those who pass a signal on."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish, or a shell's for what runs behind it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._first = number, now
        elif number == signal.SIGINT or now - self._first >= SAME_REQUEST_SECONDS:
            self.at_once = True  # a batch system tells the same request to several processes, which pass it on
