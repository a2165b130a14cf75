"""Tables and texts as HTML; everything that comes from a run is escaped here and nowhere else."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.utils.text import printable


@dataclass(frozen=True)
class Cell:
    """What one cell shows, and what it is sorted by."""

    text: str
    sort: float | str | None = None
    """None for what comes last in any order; the text where a cell is given as one."""
    mark: str = ""
    """Class: ``warn`` for what to look at, ``quiet`` for what is the same everywhere."""


def escape(text: object) -> str:
    """For elements and attributes; control characters and lone surrogates are shown as Python would write them."""
    return html.escape(printable(str(text)))


def rich(text: str) -> str:
    """Escaped, with what stands in backticks or between two pairs of asterisks as code or strong.

    For our own words alone: names of runs may have such characters.
    """
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)


def bullets(text: str) -> str:
    """A Markdown list of one level."""
    return f"<ul>{''.join(f'<li>{rich(line[2:])}</li>' for line in text.splitlines() if line.startswith('- '))}</ul>"


def table(
    name: str,
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    sortable: bool = False,
    filterable: bool = False,
    keys: bool = False,
) -> str:
    """A table in a box of its own, in which it scrolls where it is wider than the page.

    Args:
        name: its id.
        caption: what it holds.
        headings: of its columns; the cells of the first are headings of their rows.
        rows: texts, or cells, shown as they are.
        sortable: whether its headings are buttons that sort.
        filterable: whether a field above it hides rows.
        keys: whether it has a few columns alone, of keys and long values, which wrap.
    """
    numeric = [
        any(isinstance(row[column], Cell) and isinstance(row[column].sort, (int, float)) for row in rows)  # type: ignore[union-attr]
        for column in range(len(headings))
    ]
    head = "".join(
        f'<th scope="col"{" class=number" * numeric[column]}{" aria-sort=none" * sortable}>'
        + (f'<button type="button">{rich(text)}<span aria-hidden="true"></span></button>' if sortable else rich(text))
        + "</th>"
        for column, text in enumerate(headings)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, column, numeric[column]) for column, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    field = (
        f'<p class="filter"><label for="{name}-filter">Filter rows</label> '
        f'<input id="{name}-filter" type="search" data-table="{name}" autocomplete="off" spellcheck="false" '
        f'aria-describedby="{name}-help"> <output for="{name}-filter">{len(rows)} of {len(rows)} rows</output> '
        f'<span class="help" id="{name}-help">All words must occur in a row; a word with a minus before it must not.'
        "</span></p>"
        if filterable
        else ""
    )
    return (
        f'{field}<div class="box" role="region" tabindex="0" aria-labelledby="{name}-caption">'
        f'<table id="{name}"{" data-sortable" * sortable}{" class=keys" * keys}>'
        f'<caption id="{name}-caption">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell | str, column: int, numeric: bool) -> str:
    if isinstance(cell, str):
        cell = Cell(cell, cell or None)
    key = "" if cell.sort is None else f' data-sort="{escape(cell.sort)}"'
    classes = " ".join(filter(None, ["number" if numeric else "", cell.mark]))
    attributes = key + (f' class="{classes}"' if classes else "")
    return (
        f'<th scope="row"{attributes}>{escape(cell.text)}</th>'
        if column == 0
        else f"<td{attributes}>{escape(cell.text)}</td>"
    )
