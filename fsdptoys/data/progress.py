"""Progress of preparing or checking data: a bar on a terminal, else a line every few seconds."""

import sys
from time import monotonic
from typing import IO, Any

from .prepare import Advance

LINE_SECONDS = 10.0  # between two lines without a terminal
BAR_SECONDS = 0.2  # between two states of the bar


class Display:
    """A bar, or lines, on standard error."""

    def __init__(self, title: str, stream: IO[str] | None = None) -> None:
        self.title = title
        # None if it was closed when this process started
        self._stream: IO[str] | None = stream or sys.stderr
        self._bar: Any = None
        self._begun = self._shown = monotonic()

    def __enter__(self) -> "Display":
        if self._stream is not None and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[detail]}"),
            )
            # Refreshed by the caller: a thread must not run when processes are forked.
            self._bar = Progress(*columns, console=Console(file=self._stream), auto_refresh=False)
            self._bar.add_task(self.title, total=None, detail="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, advance: Advance) -> None:
        """Show the progress of a preparation."""
        detail = f"{advance.tokens / 1e6:,.1f}M tokens" if advance.tokens else ""
        self.show_bytes(advance.done_bytes, advance.total_bytes, detail)

    def show_bytes(self, done: float, total: int, detail: str = "") -> None:
        """Show progress in bytes."""
        now = monotonic()
        waited = now - self._shown
        if self._bar is not None and (waited >= BAR_SECONDS or done >= total):
            self._shown = now
            self._bar.update(0, completed=done, total=total, detail=detail, refresh=True)
        elif self._bar is None and self._stream is not None and waited >= LINE_SECONDS:
            self._shown = now
            speed = done / (now - self._begun) / 1e6
            line = f"{self.title}: {done / max(1, total):.0%}, {speed:.1f} MB/s {detail}"
            try:
                print(line.rstrip(), file=self._stream, flush=True)
            except (OSError, ValueError):  # the log's disk is full, or its reader is gone
                self._stream = None
