"""Progress of a verification on stderr: a line for each row, one every ten seconds in between."""

import time

from fsdptoys.utils.text import print_status

BEAT_SECONDS = 10.0


class Progress:
    """Lines with the time left, which is that of the finished rows divided among them.

    Args:
        rows: in all.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._finished = 0
        self._started = time.monotonic()
        self._row_started = self._started
        self._line_time = self._started
        self._name = ""

    def begin(self, name: str) -> None:
        """A row begins."""
        self._name = name
        self._row_started = time.monotonic()

    def beat(self) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if now - self._line_time >= BEAT_SECONDS:
            running = _clock(now - self._row_started)
            self._show(self._finished + 1, f"running for {running}")

    def end(self, text: str) -> float:
        """Print the verdict on the row; return the seconds it took."""
        seconds = time.monotonic() - self._row_started
        self._finished += 1
        self._show(self._finished, text)
        return seconds

    def _show(self, number: int, text: str) -> None:
        self._line_time = time.monotonic()
        elapsed = self._line_time - self._started
        left = "not known yet"
        if self._finished:
            rest = self._rows - self._finished
            left = f"about {_clock(elapsed / self._finished * rest)}"
        print_status(
            f"[{number}/{self._rows}] {self._name}: {text}; "
            f"elapsed {_clock(elapsed)}, {left} left"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
