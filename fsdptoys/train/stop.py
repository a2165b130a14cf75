"""Stop requests by signal, and the agreement of all ranks on whether to stop.

The first SIGTERM, SIGUSR1 or SIGINT stops the run after the step in which the ranks read it
(``step_readings``), on a CPU the current one; the second one ends the process at once. Python runs
signal handlers between bytecodes of the main thread, so never while that thread waits in a
collective for a lost rank. Therefore a thread reads the wakeup descriptor, to which the C handler
writes at any time. Signals within one second of the first count as the same request: batch systems
signal every process of a job, and launchers forward signals too.

Outside the ``with`` block of a ``StopRequest`` signals end the process as usual; there is nothing
to save then.

Source: https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.train_config import TrainConfig
from fsdptoys.metrics.results import RunStatus

from .callbacks import Callbacks
from .skipped_steps import SkippedSteps

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals sent by schedulers and launchers before they kill, and by Ctrl-C: finish the step, save,
end."""

SAME_REQUEST_SECONDS = 1.0
"""Signals within this time of the first one are the same request."""

_open: "StopRequest | None" = None
_fork_is_watched = False


class StopRequest:
    """Context manager that records a signal's request to stop; for the main thread only."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal, or None; all ranks must agree before any of them stops."""
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._pipe = (-1, -1)
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> "StopRequest":
        global _open, _fork_is_watched
        assert _open is None, "one request at a time"
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._watcher = threading.Thread(
            target=self._watch, args=(self._pipe[0],), name="stop request", daemon=True
        )
        self._watcher.start()
        self._wakeup_before = signal.set_wakeup_fd(
            self._pipe[1], warn_on_full_buffer=False
        )
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
                    continue  # it belongs to another handler in this process
                if self.received is None:
                    self.received = signal.Signals(number).name
                    first = now
                elif now - first >= SAME_REQUEST_SECONDS:
                    os._exit(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    """Replace the default action; the watcher thread handles the signal."""


def _leave_in_child() -> None:
    """Restore a forked child's handlers, which would write to the pipe shared with its parent."""
    global _open
    if _open is not None:
        _open._restore()
        _open = None


@dataclass(frozen=True)
class Stop:
    """Reason to stop, agreed by all ranks."""

    reason: str
    """Completes the sentence "15 of 20 steps; …"."""
    signal: bool = False
    """Whether a signal asked the process to end soon."""
    gave_up: bool = False
    """Whether too many steps were skipped."""


class Stopping:
    """Decides when a run stops.

    Args:
        train: limits of steps, of time and of skipped steps.
        callbacks: may ask to stop.
    """

    def __init__(self, train: TrainConfig, callbacks: Callbacks) -> None:
        self._train = train
        self._callbacks = callbacks
        self.begin(0)

    def begin(self, step: int, request: StopRequest | None = None) -> None:
        """Begin or continue a run after a step.

        ``request`` may ask this rank to stop, which stops all ranks.
        """
        self._request = request
        self._started = time.perf_counter()
        self.stop = self._at_end(step)
        """The first reason to stop; the same on all ranks."""

    def votes(self) -> list[float]:
        """Return this rank's votes, 1 or 0, for ``agreed_stop`` and of its callbacks."""
        received = self._request.received if self._request else None
        limit = self._train.max_seconds
        out_of_time = limit is not None and time.perf_counter() - self._started > limit
        return [float(received == number.name) for number in STOP_SIGNALS] + [
            float(out_of_time),
            *self._callbacks.votes(),
        ]

    def record(self, step: int, votes: Sequence[float], skipped: SkippedSteps) -> None:
        """Decide after a step, from its votes summed over ranks and the steps skipped so far."""
        if self.stop is None:
            count = len(STOP_SIGNALS) + 1
            self.stop = agreed_stop(self._train, votes[:count], skipped)
            reason = self._callbacks.stop_reason(votes[count:])
            if self.stop is None and reason is not None:
                self.stop = Stop(reason)
            self.stop = self.stop or self._at_end(step)

    def _at_end(self, step: int) -> Stop | None:
        return Stop("all steps done") if step >= self._train.steps else None


def agreed_stop(
    train: TrainConfig, votes: Sequence[float], skipped: SkippedSteps
) -> Stop | None:
    """Return the reason to stop after a step; None if no rank has one.

    ``votes`` are the number of ranks that received each of ``STOP_SIGNALS``, then the number of
    ranks out of time; ``skipped`` counts this step too.
    """
    for number, ranks in zip(STOP_SIGNALS, votes, strict=False):
        if ranks:
            return Stop(f"{number.name} received", signal=True)
    for key, limit, count, how in (
        (
            "max_skipped_in_a_row",
            train.max_skipped_in_a_row,
            skipped.in_a_row,
            "in a row",
        ),
        ("max_skipped", train.max_skipped, skipped.in_all_limited, "in all"),
    ):
        if skipped.limited and count >= limit:
            return Stop(
                f"{count} steps {how} had a non-finite loss or gradients (train.{key}={limit})",
                gave_up=True,
            )
    return (
        Stop(f"train.max_seconds={train.max_seconds:g} reached") if votes[-1] else None
    )


def evaluates_after(train: TrainConfig, step: int, stop: Stop | None = None) -> bool:
    """Return whether an evaluation is due after a step, after which the run may stop."""
    if train.eval_every <= 0:
        return False
    return not stop.signal if stop is not None else step % train.eval_every == 0


def saves_after(checkpoint: CheckpointConfig, step: int, stop: Stop | None) -> bool:
    """Return whether a checkpoint is due after a step, after which the run may stop."""
    if stop is not None and (stop.gave_up or stop.signal):
        return stop.gave_up or checkpoint.on_signal
    return checkpoint.every > 0 and (stop is not None or step % checkpoint.every == 0)


def run_status(stop: Stop, steps_done: int, planned: int) -> RunStatus:
    """Return the status of a run that stopped after ``steps_done`` of ``planned`` steps."""
    if stop.gave_up:
        return RunStatus.failed
    if stop.signal and steps_done < planned:
        return RunStatus.stopped
    return RunStatus.completed
