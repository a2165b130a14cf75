"""Progress of preparing or checking data: a bar on a terminal, else a line every few seconds."""

import sys
from time import monotonic
from typing import IO, Any

from .prepare import Advance

LINE_SECONDS = 10.0  # between two lines without a terminal


class Display:
    """A bar, or lines, on standard error."""

    def __init__(self, title: str, stream: IO[str] | None = None) -> None:
        self.title = title
        # None if it was closed when this process started
        self._stream: IO[str] | None = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._begun = self._shown = monotonic()

    def __enter__(self) -> "Display":
        if self._stream is not None and self._stream.isatty():
            from rich import progress
            from rich.console import Console
            from rich.table import Column

            console, whole = Console(file=self._stream), Column(no_wrap=True)
            columns = (
                progress.TextColumn("{task.description}", table_column=whole),
                progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
                progress.DownloadColumn(table_column=whole),
                progress.TransferSpeedColumn(table_column=whole),
                progress.TextColumn("{task.fields[detail]}", table_column=whole),
                progress.TimeRemainingColumn(table_column=whole),
            )
            # Refreshed by the caller: a thread must not run when processes are forked.
            self._bar = progress.Progress(
                *columns, console=console, auto_refresh=False, expand=True
            )
            self._task = self._bar.add_task(self.title, total=None, detail="")
            self._bar.start()
            console.show_cursor(True)
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
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, detail=detail)
            if now - self._shown >= 0.2 or done >= total:
                self._shown = now
                self._bar.refresh()
        elif self._stream is not None and now - self._shown >= LINE_SECONDS:
            self._shown = now
            speed = done / (now - self._begun) / 1e6
            more = f", {detail}" if detail else ""
            share = done / max(1, total)
            try:
                print(
                    f"{self.title}: {share:.0%}, {speed:.1f} MB/s{more}",
                    file=self._stream,
                    flush=True,
                )
            except (OSError, ValueError):  # the log's disk is full, or its reader is gone
                self._stream = None
