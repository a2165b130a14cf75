"""The live display: rich's own progress bar, and under it one row with the numbers of the latest step."""

import math
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .console_columns import (
    columns_for,
)
from .step import StepMetrics

GAP = 2
"""Spaces between columns."""


class StepProgress(Progress):
    """Bar with steps, elapsed and remaining time; the row below follows ``show``."""

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
            refresh_per_second=4,  # the drawing thread shares rank 0's core with the training on a CPU
        )
        self._task = self.add_task("steps", total=steps, completed=done)

    def start(self) -> None:
        """Start drawing, and show the cursor that rich has hidden: a killed process could not."""
        super().start()
        self.console.show_cursor(True)

    def show(self, metrics: StepMetrics) -> None:
        """Move on to a step that was done."""
        self._latest = metrics
        self.update(self._task, completed=metrics.step)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the row."""
        yield from super().get_renderables()
        if self._latest is not None:
            yield metrics_table(self._latest, self.console.width)


def metrics_table(metrics: StepMetrics, width: int) -> Table:
    """Headings over the numbers of a step, in columns that keep their place from step to step.

    Where they do not all fit, the least important are left out, rather than any number cut.
    """
    columns = columns_for(metrics)
    cells = {column: column.render(metrics) for column in columns}
    widths = {column: max(column.width, len(cell), *map(len, column.heading)) for column, cell in cells.items()}
    while len(columns) > 1 and sum(widths[column] for column in columns) + GAP * (len(columns) - 1) > width:
        columns.remove(min(columns, key=lambda column: column.importance))
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(justify="right", no_wrap=True, width=widths[column])
    for line in range(2):
        table.add_row(*(Text(column.heading[line], style="dim") for column in columns))
    table.add_row(*(Text(cells[column], style=_style(cells[column])) for column in columns))
    return table


def _style(cell: str) -> str:
    number = cell.split(" ")[0].rstrip("%Mx").replace(",", "")
    try:
        return "bold" if math.isfinite(float(number)) else "bold red"
    except ValueError:
        return "bold"
