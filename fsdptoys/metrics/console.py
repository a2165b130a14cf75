"""Console output of rank 0: a live table with rich, plain lines, or nothing.

No controlling terminal is needed: rich reads the size from the stream itself, so workers in their
own session can draw too. The cursor stays visible, since a killed process could not restore it.
"""

import os
import sys
from typing import IO, TYPE_CHECKING

from fsdptoys.utils.text import printable, wrapped

from .config import Console
from .console_columns import render_columns
from .step import StepMetrics

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


class Reporter:
    """Prints nothing; the base class of the other reporters."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a completed step."""

    def message(self, text: str) -> None:
        """Show text on separate lines."""

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


class PlainReporter(Reporter):
    """One line every ``log_every`` steps and for the last one, with extra lines for the events of a
    step."""

    def __init__(self, steps: int, log_every: int, stream: IO[str]) -> None:
        self._steps = steps
        self._log_every = log_every
        self._stream = stream
        self._unprinted: StepMetrics | None = None

    def step(self, metrics: StepMetrics) -> None:
        """Print the step if it is due, and its events."""
        self._unprinted = metrics
        if metrics.step % self._log_every == 0 or metrics.step == self._steps:
            self._print_step()
        for line in event_lines(metrics):
            self.message(line)

    def message(self, text: str) -> None:
        """Print text on separate lines."""
        print(
            wrapped(printable(text, self._stream), self._stream),
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        """Print the last step if it has not been printed."""
        if self._unprinted is not None:
            self._print_step()

    def _print_step(self) -> None:
        metrics, self._unprinted = self._unprinted, None
        assert metrics is not None
        width = len(str(self._steps))
        cells = [f"{label} {text}" for label, text in render_columns(metrics).items()]
        mark = "  skipped" * metrics.skipped
        self.message(
            f"step {metrics.step:>{width}}/{self._steps}{mark}  " + "  ".join(cells)
        )


class RichReporter(Reporter):
    """A progress bar with elapsed and remaining time over a table of the latest step."""

    def __init__(
        self, steps: int, console: "RichConsole", resumed_step: int = 0
    ) -> None:
        from .live_console import StepProgress

        self._console = console
        self._progress = StepProgress(steps, console, resumed_step)
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Advance the bar and show the step."""
        self._progress.show(metrics)
        for line in event_lines(metrics):
            self.message(line)

    def message(self, text: str) -> None:
        """Print text above the bar."""
        text = wrapped(printable(text, self._console.file), self._console.file)
        self._console.print(
            text, markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def close(self) -> None:
        """Draw the last state and stop."""
        if self._progress.live.is_started:  # rich adds an empty line each time
            self._progress.stop()


def build_reporter(
    choice: Console, steps: int, log_every: int, resumed_step: int = 0
) -> Reporter:
    """Construct the configured reporter on stdout; ``resumed_step`` is the step from which the run
    resumes."""
    if choice is Console.auto:
        can_draw = (
            sys.stdout is not None
            and sys.stdout.isatty()
            and os.environ.get("TERM") not in ("dumb", "unknown")
        )
        choice = Console.rich if can_draw else Console.plain
    if choice is Console.rich:
        import rich.console

        return RichReporter(steps, rich.console.Console(file=sys.stdout), resumed_step)
    return (
        PlainReporter(steps, log_every, sys.stdout)
        if choice is Console.plain
        else Reporter()
    )


def event_lines(metrics: StepMetrics) -> list[str]:
    """Lines on the events of a step: a skipped optimizer step, a loss spike, an evaluation."""
    lines = []
    if metrics.skipped:
        lines.append(
            (
                f"optimizer step skipped: the loss ({metrics.loss:.4g}) or the gradient norm "
                f"({metrics.grad_norm:.4g}) is not finite; skipped steps so far: "
                f"{metrics.skipped_steps}"
            )
            + (
                f"; the loss scale was {metrics.loss_scale:g}"
                if metrics.loss_scale is not None
                else ""
            )
        )
    if metrics.loss_spike is not None:
        lines.append(
            f"loss spike: {metrics.loss:.4f} is {metrics.loss_spike:.1f} robust standard "
            "deviations above the median of earlier losses"
        )
    if metrics.eval_loss is not None:
        lines.append(f"held-out loss {metrics.eval_loss:.4f} nats per token")
    return [f"step {metrics.step}: {line}" for line in lines]
