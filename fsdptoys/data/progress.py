"""Progress of preparing or checking data: a line every few seconds."""

from time import monotonic

from fsdptoys.utils.text import print_status

from .prepare import Advance

LINE_SECONDS = 10.0  # between two lines


class Display:
    """Lines on standard error, from now on."""

    def __init__(self, title: str, total_bytes: int = 0) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self._done_bytes = 0
        self._start = monotonic()
        self._line_time = self._start

    def advance(self, count: int) -> None:
        """Show the progress after ``count`` more of ``total_bytes``."""
        self._done_bytes += count
        self._show(self._done_bytes, self.total_bytes, "")

    def show(self, advance: Advance) -> None:
        """Show the progress of a preparation."""
        detail = f"{advance.tokens / 1e6:,.1f}M tokens" if advance.tokens else ""
        self._show(advance.done_bytes, advance.total_bytes, detail)

    def _show(self, done_bytes: float, total_bytes: int, detail: str) -> None:
        now = monotonic()
        if now - self._line_time >= LINE_SECONDS:
            self._line_time = now
            share = done_bytes / max(1, total_bytes)
            speed = done_bytes / (now - self._start) / 1e6
            line = f"{self.title}: {share:.0%}, {speed:.1f} MB/s {detail}"
            print_status(line.rstrip())
