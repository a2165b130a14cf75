"""Progress of preparing or checking data: a line every few seconds."""

from time import monotonic

from fsdptoys.utils.text import print_status

from .prepare import Advance

LINE_SECONDS = 10.0  # between two lines


class Display:
    """Lines on standard error while a ``with`` block runs."""

    def __init__(self, title: str) -> None:
        self.title = title

    def __enter__(self) -> "Display":
        self._begun = self._shown = monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, advance: Advance) -> None:
        """Show the progress of a preparation."""
        detail = f"{advance.tokens / 1e6:,.1f}M tokens" if advance.tokens else ""
        self.show_bytes(advance.done_bytes, advance.total_bytes, detail)

    def show_bytes(self, done: float, total: int, detail: str = "") -> None:
        """Show progress in bytes."""
        now = monotonic()
        if now - self._shown >= LINE_SECONDS:
            self._shown = now
            speed = done / (now - self._begun) / 1e6
            line = (
                f"{self.title}: {done / max(1, total):.0%}, {speed:.1f} MB/s {detail}"
            )
            print_status(line.rstrip())
