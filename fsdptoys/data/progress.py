"""What a person sees while data is prepared or checked: a bar on a terminal, else a line now and then."""

import sys
from time import monotonic
from types import TracebackType
from typing import IO, Any

from fsdptoys.utils.text import say

from .prepare import Advance

LINE_SECONDS = 10.0
"""From one line to the next where there is no terminal."""


def tell(text: str) -> None:
    """Say something on a line of its own."""
    say(text)


class Display:
    """A bar, or lines, on standard error."""

    def __init__(self, what: str, stream: IO[str] | None = None) -> None:
        self.what = what
        self._stream: IO[str] | None = stream or sys.stderr  # None where it was closed when this process started
        self._bar: Any = None
        self._task: Any = None
        self._begun = self._told = monotonic()

    def __enter__(self) -> "Display":
        if self._stream is not None and self._stream.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.table import Column

            console, whole = Console(file=self._stream), Column(no_wrap=True)
            columns = (
                TextColumn("{task.description}", table_column=whole),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                DownloadColumn(table_column=whole),
                TransferSpeedColumn(table_column=whole),
                TextColumn("{task.fields[told]}", table_column=whole),
                TimeRemainingColumn(table_column=whole),
            )
            # Drawn by whoever tells how far it is: a thread of its own must not be there when processes are forked.
            self._bar = Progress(*columns, console=console, auto_refresh=False, expand=True)
            self._task = self._bar.add_task(self.what, total=None, told="")
            self._bar.start()
            console.show_cursor(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, advance: Advance) -> None:
        """Tell how far it has come."""
        told = f"{advance.tokens / 1e6:,.1f}M tokens" if advance.tokens else ""
        self.show_bytes(advance.done_bytes, advance.total_bytes, told)

    def show_bytes(self, done: float, total: int, told: str = "") -> None:
        """Tell how far it has come, of so many bytes."""
        now = monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, told=told)
            if now - self._told >= 0.2 or done >= total:
                self._told = now
                self._bar.refresh()
        elif self._stream is not None and now - self._told >= LINE_SECONDS:
            self._told = now
            speed = done / (now - self._begun) / 1e6
            more = f", {told}" if told else ""
            share = done / max(1, total)
            try:
                print(f"{self.what}: {share:.0%}, {speed:.1f} MB/s{more}", file=self._stream, flush=True)
            except (OSError, ValueError):  # the disk of a log is full, or its reader gone
                self._stream = None
