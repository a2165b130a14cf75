"""Live display: rich's progress bar above the numbers of the latest step."""

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from .console_columns import render_columns
from .step import StepMetrics


class StepProgress(Progress):
    """Bar with steps, elapsed and remaining time; ``show`` updates the numbers below."""

    def __init__(self, steps: int, console: Console, resumed_step: int = 0) -> None:
        self._latest: StepMetrics | None = None
        super().__init__(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("elapsed"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
            refresh_per_second=4,  # on a CPU, the drawing thread competes with training for cores
        )
        self._task = self.add_task("steps", total=steps, completed=resumed_step)

    def start(self) -> None:
        """Start drawing, and show the cursor hidden by rich, since a killed process could not
        restore it."""
        super().start()
        self.console.show_cursor(True)

    def show(self, metrics: StepMetrics) -> None:
        """Advance to a completed step."""
        self._latest = metrics
        self.update(self._task, completed=metrics.step)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the numbers."""
        yield from super().get_renderables()
        if self._latest is not None:
            yield metrics_columns(self._latest)


def metrics_columns(metrics: StepMetrics) -> Columns:
    """Numbers of a step in columns, as many as fit."""
    cells = [
        Text.assemble((label, "dim"), " ", (text, "bold"))
        for label, text in render_columns(metrics).items()
    ]
    return Columns(cells, padding=(0, 2))
