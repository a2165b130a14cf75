"""Tables as aligned lines, as Markdown, and as grids that wrap long cells in a terminal."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .text import encodable, printable

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2  # Spaces between columns


def align_columns(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (0,)
) -> list[str]:
    """Lines of a table with two spaces between columns; ``right`` lists the right-aligned
    columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format rows as Markdown, the first as headings; ``right`` lists the right-aligned columns."""
    rule = ["---:" if column in right else "---" for column in range(len(rows[0]))]
    lines = [rows[0], rule, *rows[1:]]
    escaped = ([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def print_grid(
    rows: Sequence[Sequence[str]],
    justify: str,
    console: "Console",
    *,
    headed: bool = False,
    wraps: Sequence[int] | None = None,
) -> None:
    """Print columns that any terminal can show.

    Args:
        justify: ``l`` or ``r`` of each column.
        headed: whether the first row has headings.
        wraps: columns that wrap; the last one by default.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for index, side in enumerate(justify):
        folds = index in wraps if wraps is not None else index == len(justify) - 1
        lines = (line for row in rows for line in row[index].split("\n"))
        width = None if folds else max(map(len, lines))
        table.add_column(
            justify="right" if side == "r" else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=width,
        )
    for index, row in enumerate(rows):
        cells = (Text(encodable(printable(cell), console.file)) for cell in row)
        table.add_row(*cells, style="dim" if headed and index == 0 else "")
    console.print(table, highlight=False)
