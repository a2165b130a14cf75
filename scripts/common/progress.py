"""Progress of a script on stderr: a line for each finished unit, and one at least every ten seconds
in between.

    with progress(units=24):
        for row in rows:
            with unit(row.name) as done:
                done.note = measure(row)

prints ``[3/24] row-name: note … 0:12, elapsed 0:41, about 4:10 left``, and while a unit takes
longer ``[4/24] row-name … running for 0:09, elapsed 0:50, about 4:01 left``.

A small process of its own has the clock and prints, so that nothing else runs in the process that
measures: that one writes to a pipe between units, a few microseconds each, and has no thread.
Forked ranks share the pipe, and rank 0 may announce units; spawned ranks announce nothing. If
stderr is closed or its reader gone, the script continues in silence.

The time left is that of the finished units, divided among them: units of very different length make
it a rough one.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

BEAT_SECONDS = 9.0
"""From one line to the next at most; the rest of ten seconds is for a busy machine."""


@dataclass
class ProgressUnit:
    """Printed when a unit is finished."""

    note: object = ""


_pipe: Connection | None = None


@contextmanager
def progress(units: int) -> Iterator[None]:
    """Announce the units of the block.

    Args:
        units: in all.
    """
    global _pipe
    assert _pipe is None, "one progress at a time"
    reader, _pipe = Pipe(duplex=False)
    printer = None
    try:
        command = [
            sys.executable,
            "-I",
            "-S",
            __file__,
            str(reader.fileno()),
            str(units),
        ]
        # No memory or processes left: the script itself may still do
        with suppress(OSError):
            printer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[reader.fileno()]
            )
        reader.close()
        yield
    finally:
        _send("close", "", "")
        _pipe.close()
        _pipe = None
        if printer is not None:
            try:
                printer.wait(10.0)
            except subprocess.TimeoutExpired:  # its stderr is a full pipe
                printer.kill()
                printer.wait()


@contextmanager
def unit(name: str, *, announce: bool = True) -> Iterator[ProgressUnit]:
    """One unit of the ``progress`` around it; without one, nothing is announced.

    Args:
        name: for people.
        announce: false on all ranks but one.
    """
    progress_unit = ProgressUnit()
    if announce:
        _send("begin", name, "")
    yield progress_unit
    if announce:
        _send("end", name, str(progress_unit.note))


def doing(text: str) -> None:
    """Announce work between units, such as writing inputs."""
    _send("doing", text, "")


def _send(what: str, name: str, note: str) -> None:
    if _pipe is not None:
        with suppress(OSError):
            # At most PIPE_BUF bytes, which pipes keep whole: ranks share this one.
            message = json.dumps([what, _plain(name), _plain(note)], ensure_ascii=False)
            _pipe.send_bytes(message.encode("utf-8", "replace"))


def _plain(text: str) -> str:
    """At most 300 characters, without those that steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:300])


class Printer:
    """Units as they begin and end, as lines.

    Args:
        units: in all.
        now: seconds of a clock.
    """

    def __init__(self, units: int, now: float) -> None:
        self.units = units
        self.finished_units = 0
        self._started = self._finished = now
        self._running: dict[str, float] = {}
        self._between = "starting"
        self._since = now

    def doing(self, text: str, now: float) -> None:
        """Something between units begins."""
        self._between = text
        self._since = now

    def begin(self, name: str, now: float) -> None:
        """A unit begins."""
        self._running[name] = now

    def end(self, name: str, note: str, now: float) -> str:
        """A unit is finished; returns its line."""
        self.finished_units += 1
        self._finished = now
        took = now - self._running.pop(name, now)
        label = f"{name}: {note}" if note else name
        return f"[{self.finished_units}/{self.units}] {label} … {clock(took)}, {self._times(now)}"

    def beat(self, now: float) -> str:
        """The line of a time in which nothing ended."""
        name, since = min(
            self._running.items(),
            key=lambda item: item[1],
            default=(self._between, self._since),
        )
        number = min(self.finished_units + 1, self.units)
        return (
            f"[{number}/{self.units}] {name} … running for {clock(now - since)}, "
            f"{self._times(now)}"
        )

    def _times(self, now: float) -> str:
        elapsed = now - self._started
        if not self.finished_units:
            return f"elapsed {clock(elapsed)}, time left not known yet"
        unit_seconds = (self._finished - self._started) / self.finished_units
        overdue = max(0.0, now - self._finished - unit_seconds)
        left = max(
            0.0,
            (unit_seconds + overdue / self.finished_units)
            * (self.units - self.finished_units)
            - min(now - self._finished, unit_seconds),
        )
        return f"elapsed {clock(elapsed)}, about {clock(left)} left"


def clock(seconds: float) -> str:
    """``0:41``, ``12:05`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def write_line(line: str) -> bool:
    """Print a line on stderr; returns whether it succeeded."""
    if sys.stderr is None:
        return False
    try:
        encoding = sys.stderr.encoding
        print(
            line.encode(encoding, "replace").decode(encoding),
            file=sys.stderr,
            flush=True,
        )
    except (OSError, ValueError):
        return False
    return True


def main() -> None:
    """Print the lines from the pipe, until its end or that of the script."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script's to answer
    pipe = Connection(int(sys.argv[1]), writable=False)
    parent = os.getppid()
    last = time.monotonic()
    printer = Printer(int(sys.argv[2]), last)
    prints = True
    while os.getppid() == parent:
        ready, _, _ = select.select(
            [pipe], [], [], max(0.0, last + BEAT_SECONDS - time.monotonic())
        )
        now = time.monotonic()
        line = None
        if ready:
            try:
                what, name, note = json.loads(pipe.recv_bytes())
            except EOFError:
                return
            if what == "close":
                return
            if what == "begin":
                printer.begin(name, now)
            elif what == "doing":
                printer.doing(name, now)
            else:
                line = printer.end(name, note, now)
        elif now - last >= BEAT_SECONDS:
            line = printer.beat(now)
        if line is not None:
            prints = prints and write_line(line)
            last = now


if __name__ == "__main__":
    main()
