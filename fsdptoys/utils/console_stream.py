"""Standard output and error that survive failures: a full disk, a broken pipe, a closed stream.

A training run must not lose the steps since the last checkpoint for a failed print. So the raw
descriptor below each stream's buffer drops failed writes and remembers the first reason. This
covers ``print``, rich and its thread, warnings, logging, tracebacks, and the flush at the
interpreter's exit; its failure would change the exit status to 120. Commands that print their
result (``report``, ``plan``, ``--cfg job``) keep the exceptions of stdout.
"""

import errno
import io
import os
import select
import sys
from typing import Any

STDIN = 0
STDOUT = 1
STDERR = 2

NAMES = {STDOUT: "stdout", STDERR: "stderr"}

_lost: dict[int, int] = {}  # descriptor → number of the first error

_replaced_streams: list[Any] = []
"""Kept alive, since garbage collection of a stream may close its descriptor."""

_stdout_may_end = False


def install_streams() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``, and occupy descriptors 0 to 2 where they are
    closed.

    Otherwise the next opened file would get the descriptor of a closed stream, and its output.
    Streams of a test runner or a notebook stay.
    """
    global _stdout_may_end
    _stdout_may_end = False
    closed = hold_descriptors()
    sys.stdout = _replaced(sys.stdout, STDOUT, closed)
    sys.stderr = _replaced(sys.stderr, STDERR, closed)


def reopen_streams() -> None:
    """Open new streams in a forked process, without its parent's buffers and lost output."""
    _lost.clear()
    hold_descriptors()
    # multiprocessing has put another file in place of a fork's stdin.
    sys.stdin = os.fdopen(STDIN, closefd=False)
    sys.stdout = os.fdopen(STDOUT, "w", closefd=False)
    sys.stderr = os.fdopen(STDERR, "w", closefd=False)


def let_stdout_end() -> None:
    """From now on, remember failures of stdout instead of raising them, as for stderr."""
    global _stdout_may_end
    _stdout_may_end = True


def lost_output() -> dict[str, str]:
    """Return the name of each stream with lost output → the first reason, in the system's words."""
    lost = sorted(_lost.items())  # a copy: threads may lose more output meanwhile
    return {
        NAMES[number]: "it is closed" if code == errno.EBADF else os.strerror(code)
        for number, code in lost
    }


def hold_descriptors() -> set[int]:
    """Open /dev/null on closed descriptors among 0 to 2, and return these.

    It is opened for reading only, so that a child process still sees that it cannot print.
    """
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            closed.add(number)
    return closed


class _Descriptor(io.FileIO):
    """A standard descriptor; its writes never fail."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._number = number

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:  # python -u would lose the rest of a short write
                count = super().write(left)
                if count is None:  # a non-blocking pipe is full
                    select.select([], [self], [])
                left = left[count or 0 :]
        except OSError as error:
            _lost.setdefault(self._number, error.errno or errno.EIO)
            # A stream closed from the start is the user's choice, as with a plain print.
            if (
                self._number == STDOUT
                and not _stdout_may_end
                and error.errno != errno.EBADF
            ):
                raise
        return len(data)


def _replaced(stream: Any, number: int, closed: set[int]) -> Any:
    if stream is None:  # its descriptor was closed when the interpreter started
        target: Any = _Descriptor(number)
        if number not in closed:
            target = open(os.devnull, "wb", buffering=0)  # noqa: SIM115
        return io.TextIOWrapper(
            io.BufferedWriter(target), "utf-8", "backslashreplace", line_buffering=True
        )
    if type(stream) is not io.TextIOWrapper or _number_of(stream) != number:
        return stream
    if isinstance(getattr(stream.buffer, "raw", stream.buffer), _Descriptor):
        return stream
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        _lost.setdefault(number, getattr(error, "errno", None) or errno.EIO)
    _replaced_streams.append(stream)
    raw: Any = _Descriptor(number)
    return io.TextIOWrapper(
        raw
        if stream.write_through
        else io.BufferedWriter(raw),  # python -u has no buffer
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _number_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
