"""Print tables to a terminal, dropping columns that do not fit."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from fsdptoys.utils.tables import GAP, print_grid
from fsdptoys.utils.text import encodable, printable, value_text

from .columns import STAYS, TableCell, TableColumn
from .setting_diff import as_override
from .table import Table

WIDEST_TEXT = 8
"""Characters that a text needs at most, since long ones wrap."""


def print_table(table: Table, console: Console) -> None:
    """Print title, common values, rows, notes and skipped combinations."""
    print_line(table.title, console, "bold")
    if table.everywhere:
        print_line(f"Everywhere: {'; '.join(table.everywhere)}", console)
    console.print()
    columns = fit(table.columns, console.width)
    if table.records:
        _print_rows(columns, console)
        console.print()
    if columns != table.columns:
        names = {column.name for column in columns}
        missing = [
            column.heading for column in table.columns if column.name not in names
        ]
        listed = ", ".join(["the numbers in brackets", *missing])
        print_line(f"No room for {listed}; --csv has all columns.", console)
    for sentence in table.notes:
        print_line(sentence, console)
    for skipped in table.skipped:
        overrides = " ".join(
            as_override(key, value) for key, value in skipped.varied.items()
        )
        print_line(f"skipped {overrides}: {value_text(skipped.reason)}", console)


def fit(columns: list[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns that fit: first without percentiles, then without the lightest."""
    if _width_of(columns) <= width:
        return columns
    visible = [
        replace(
            column,
            cells=[
                TableCell(cell.value, cell.brief or cell.text) for cell in column.cells
            ],
        )
        for column in columns
    ]
    lightest = min(visible, key=lambda column: column.weight)
    while _width_of(visible) > width and lightest.weight < STAYS:
        visible.remove(lightest)
        lightest = min(visible, key=lambda column: column.weight)
    return visible


def _width_of(columns: Sequence[TableColumn]) -> int:
    """Characters needed by columns side by side, gaps included."""
    width = GAP * (len(columns) - 1)
    for column in columns:
        longest = max(
            map(len, [*column.heading.split(), *(cell.text for cell in column.cells)])
        )
        width += longest if column.numeric else min(longest, WIDEST_TEXT)
    return width


def _print_rows(columns: Sequence[TableColumn], console: Console) -> None:
    headings = [
        column.heading.replace(" ", "\n") if column.numeric else column.heading
        for column in columns
    ]
    rows = zip(
        *([cell.text for cell in column.cells] for column in columns), strict=True
    )
    justify = "".join("r" if column.numeric else "l" for column in columns)
    wraps = [index for index, column in enumerate(columns) if not column.numeric]
    print_grid([headings, *map(list, rows)], justify, console, headed=True, wraps=wraps)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print text that any terminal can show, without markup."""
    console.print(
        encodable(printable(text), console.file),
        style=style,
        highlight=False,
        markup=False,
        emoji=False,
    )
