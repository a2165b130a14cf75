"""Live display: rich's progress bar above a row with the numbers of the latest step."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .console_columns import render_columns
from .step import StepMetrics

GAP = 2
"""Spaces between columns."""


class StepProgress(Progress):
    """Bar with steps, elapsed and remaining time; ``show`` updates the row below."""

    def __init__(self, steps: int, console: Console, done: int = 0) -> None:
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
        self._task = self.add_task("steps", total=steps, completed=done)

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
        """The bar, then the row."""
        yield from super().get_renderables()
        if self._latest is not None:
            yield metrics_table(self._latest, self.console.width)


def metrics_table(metrics: StepMetrics, width: int) -> Table:
    """Headings and numbers of a step, in columns whose positions stay the same from step to step.

    Without enough room for all columns, the least important ones are omitted; no number is
    truncated.
    """
    cells = render_columns(metrics)
    columns, headings = list(cells), {column: column.heading for column in cells}
    for column in columns:
        if "{unit}" in column.heading[0]:
            cells[column], unit = cells[column].split(" ")
            headings[column] = (column.heading[0].format(unit=unit), column.heading[1])
    widths = {
        column: max(column.width, len(cells[column]), *map(len, headings[column]))
        for column in columns
    }
    while (
        len(columns) > 1
        and sum(widths[column] for column in columns) + GAP * (len(columns) - 1) > width
    ):
        columns.remove(min(columns, key=lambda column: column.importance))
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(justify="right", no_wrap=True, width=widths[column])
    for line in range(2):
        table.add_row(*(Text(headings[column][line], style="dim") for column in columns))
    table.add_row(*(Text(cells[column], style="bold") for column in columns))
    return table
