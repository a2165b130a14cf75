"""A signal that asks a rank to stop: remembered until the step is done, and obeyed at once when it comes again.

Python runs a signal's handler between two bytecodes of the main thread, so never while that thread waits in a
collective for a rank that is gone. The wakeup descriptor is written by the C handler itself, whatever the main thread
does; a thread that reads it remembers the first signal and ends the process with the second. A second one within a
second of the first is the same request, told twice: a batch system signals every process of a job, and a launcher
forwards what it got.

Outside the ``with`` block nothing is changed: before the loop there is nothing to save, and a signal ends the process.

Source: https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd

Why a run takes no further step, which all ranks must agree on.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdptoys.config.schema import TrainConfig

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers and launchers send before they kill: finish the step, save, end with status 0."""

SAME_REQUEST_SECONDS = 1.0
"""Signals that follow the first one sooner are the same request."""

_open: "StopRequest | None" = None
_fork_is_watched = False


class StopRequest:
    """Remembers that a signal asked to stop, for as long as it is entered; in the main thread only."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal, or None so far; all ranks have to agree on it before any of them stops."""
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._pipe = (-1, -1)
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> "StopRequest":
        global _open, _fork_is_watched
        assert _open is None, "one request at a time"
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._watcher = threading.Thread(target=self._watch, args=(self._pipe[0],), name="stop request", daemon=True)
        self._watcher.start()
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _note) for number in STOP_SIGNALS}
        if not _fork_is_watched:
            os.register_at_fork(after_in_child=_leave_in_child)
            _fork_is_watched = True
        _open = self
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        self._restore()
        _open = None
        reader, writer = self._pipe
        os.write(writer, b"\0")  # no signal has the number 0
        assert self._watcher is not None
        self._watcher.join()
        os.close(writer)
        os.close(reader)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)

    def _watch(self, reader: int) -> None:
        first = 0.0
        while True:
            for number in os.read(reader, 64):
                now = time.monotonic()
                if number == 0:
                    return
                if number not in STOP_SIGNALS:
                    continue  # of another handler in this process
                if self.received is None:
                    self.received, first = signal.Signals(number).name, now
                elif now - first >= SAME_REQUEST_SECONDS:
                    os._exit(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    """Stand in for the default action; the watcher has the signal already."""


def _leave_in_child() -> None:
    """Keep a forked child's signals from being told to its parent, over the pipe that both would have."""
    global _open
    if _open is not None:
        _open._restore()
        _open = None


@dataclass(frozen=True)
class Stop:
    """Why a run takes no further step, agreed by all ranks."""

    reason: str
    """As the end of "15 of 20 steps; …"."""
    signal: bool = False
    """Whether somebody outside wants the process to end soon."""
    gave_up: bool = False
    """Whether going on made no sense."""


def agreed_stop(
    train: TrainConfig, votes: Sequence[float], *, skipped: bool, in_a_row: int, in_all: int
) -> Stop | None:
    """Why to stop after a step, if any rank has a reason.

    Args:
        train: for its limits.
        votes: how many ranks received each of ``STOP_SIGNALS``, and how many are out of time.
        skipped: whether the step made no update.
        in_a_row: steps without update one after the other, up to this one.
        in_all: steps without update in the whole run.
    """
    for number, ranks in zip(STOP_SIGNALS, votes, strict=False):
        if ranks:
            return Stop(f"{number.name} received", signal=True)
    for key, limit, count, how in (
        ("max_skipped_in_a_row", train.max_skipped_in_a_row, in_a_row, "in a row"),
        ("max_skipped", train.max_skipped, in_all, "in all"),
    ):
        if skipped and count >= limit:
            return Stop(
                f"{count} steps {how} had a loss or gradients that are not finite (train.{key}={limit})", gave_up=True
            )
    return Stop(f"train.max_seconds={train.max_seconds:g} reached") if votes[-1] else None
