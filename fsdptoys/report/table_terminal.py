"""Print tables to a terminal, dropping or merging columns that do not fit."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fsdptoys.utils.tables import GAP
from fsdptoys.utils.text import encodable, printable, value_text

from .columns import STAYS, TableCell, TableColumn
from .setting_diff import as_word
from .table import Table

# Minimum width in characters of the merged column of settings, if its texts are that long
LEAST_WORDS = 32
WANTED = 70  # Columns of this weight or more are kept in preference to one column per setting
SETTINGS = "settings"


def print_table(table: Table, console: Console) -> None:
    """Print title, common values, rows, notes and skipped combinations."""
    print_line(table.title, console, "bold")
    if table.everywhere:
        print_line(f"Everywhere: {'; '.join(table.everywhere)}", console)
    columns, left_out = fit(table.columns, console.width)
    brief = width_of(table.columns) > console.width
    if any(column.name == SETTINGS for column in columns):
        usual = _usual_words([column for column in table.columns if column.setting])
        print_line(f"Unless a row states otherwise: {' '.join(usual)}", console)
    if table.records:
        console.print()
        _print_rows(columns, console)
    console.print()
    if brief:
        names = ", ".join(["the numbers in brackets", *(column.heading for column in left_out)])
        print_line(f"No room for {names}; --csv has all columns.", console)
    for sentence in table.notes:
        print_line(sentence, console)
    for skipped in table.skipped:
        words = " ".join(as_word(key, value) for key, value in skipped.varied.items())
        print_line(f"skipped {words}: {value_text(skipped.reason)}", console)


def fit(columns: Sequence[TableColumn], width: int) -> tuple[list[TableColumn], list[TableColumn]]:
    """Split columns into those that fit and those left out.

    Percentiles are dropped first, then the lightest columns. Before a column of weight ``WANTED``
    or more goes, all settings are merged into one wrapping column that lists each row's deviations
    from the most common values.
    """
    kept = list(columns)
    if width_of(kept) <= width:
        return kept, []
    brief = [_briefly(column) for column in kept]
    for candidates, least in ((brief, WANTED), (_with_settings_in_one(brief), STAYS)):
        kept = list(candidates)
        while width_of(kept) > width and any(column.weight < least for column in kept):
            kept.remove(min(kept, key=lambda column: column.weight))
        if width_of(kept) <= width:
            break
    names = {column.name for column in kept}
    return kept, [column for column in columns if column.name not in names and not column.setting]


def width_of(columns: Sequence[TableColumn]) -> int:
    """Characters needed by columns side by side, gaps included."""
    return sum(_column_width(column) for column in columns) + GAP * (len(columns) - 1)


def _column_width(column: TableColumn) -> int:
    """Width of the widest cell or heading word, since headings wrap; the minimum for the column of
    settings."""
    texts = [cell.text for cell in column.cells]
    if column.name == SETTINGS:
        return max(len(column.heading), min(LEAST_WORDS, max(map(len, texts))))
    return max(len(text) for text in [*column.heading.split(), *texts])


def _briefly(column: TableColumn) -> TableColumn:
    return replace(
        column, cells=[TableCell(cell.value, cell.brief or cell.text) for cell in column.cells]
    )


def _with_settings_in_one(columns: Sequence[TableColumn]) -> list[TableColumn]:
    """Merge settings into one column that lists deviations from the most common values."""
    settings = [column for column in columns if column.setting]
    if not settings:
        return list(columns)
    usual = _usual_words(settings)
    rows = [
        [
            as_word(column.name, cell.value)
            for column in settings
            if (cell := column.cells[row]).value is not None
        ]
        for row in range(len(settings[0].cells))
    ]
    texts = [" ".join(word for word in words if word not in usual) or "-" for words in rows]
    merged = TableColumn(
        SETTINGS, "Settings", [TableCell(text, text) for text in texts], False, STAYS, setting=True
    )
    first = columns.index(settings[0])
    others = [column for column in columns if not column.setting]
    return [*others[:first], merged, *others[first:]]


def _usual_words(settings: Sequence[TableColumn]) -> list[str]:
    words = (
        [as_word(column.name, value) for value in column.values if value is not None]
        for column in settings
    )
    return [Counter(each).most_common(1)[0][0] for each in words if each]


def _print_rows(columns: Sequence[TableColumn], console: Console) -> None:
    grid = Grid(
        box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold", show_edge=False
    )
    too_wide = max(0, width_of(columns) - console.width)
    for column in columns:
        wraps, width = column.name == SETTINGS, _column_width(column)
        grid.add_column(
            terminal_text(column.heading, console),
            justify="right" if column.numeric else "left",
            overflow="fold",
            min_width=max(len(column.heading), width - too_wide) if wraps else width,
            max_width=None if wraps else width,
        )
    for row in range(len(columns[0].cells)):
        grid.add_row(*(terminal_text(column.cells[row].text, console) for column in columns))
    console.print(grid, highlight=False)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print text that any terminal can show, without markup."""
    console.print(
        encodable(printable(text), console.file),
        style=style,
        highlight=False,
        markup=False,
        emoji=False,
    )


def terminal_text(text: str, console: Console) -> Text:
    """A cell that any terminal can show, without markup."""
    return Text(encodable(printable(text), console.file))
