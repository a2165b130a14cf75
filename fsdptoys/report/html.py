"""Tables and texts as HTML, with all text from runs escaped."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.utils.text import printable


@dataclass(frozen=True)
class HtmlCell:
    """Text and sort key of one cell."""

    text: str
    sort: float | str | None = None  # Sort key; None sorts last in either direction
    mark: str = ""  # CSS classes: ``warn`` highlights, ``quiet`` dims, ``nowrap`` keeps the text on one line


def escape(text: object) -> str:
    """Escape for elements and attributes; control characters and lone surrogates appear as in Python's ``repr``."""
    return html.escape(printable(str(text)))


def rich(text: str) -> str:
    """Escape, and convert Markdown's code and strong marks.

    For text of this package only: names of runs may contain these characters.
    """
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)


def bullets(lines: Sequence[str]) -> str:
    """Convert the lines of a flat Markdown list."""
    return f"<ul>{''.join(f'<li>{rich(line)}</li>' for line in lines)}</ul>"


def table(
    name: str,
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[HtmlCell | str]],
    *,
    sortable: bool = False,
    filterable: bool = False,
    keys: bool = False,
) -> str:
    """A table in a box that scrolls horizontally if the table is wider than the page; texts are escaped.

    Args:
        name: element id.
        caption: title.
        headings: column headings; cells of the first column are row headings.
        rows: cells, or texts sorted as they are.
        sortable: whether headings are buttons that sort.
        filterable: whether a field above the table filters rows.
        keys: whether the table has few columns, of keys and long values that wrap.
    """
    numeric = [
        any(isinstance(row[column], HtmlCell) and isinstance(row[column].sort, (int, float)) for row in rows)  # type: ignore[union-attr]
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


def _cell(cell: HtmlCell | str, column: int, numeric: bool) -> str:
    if isinstance(cell, str):
        cell = HtmlCell(cell, cell or None)
    key = "" if cell.sort is None else f' data-sort="{escape(cell.sort)}"'
    classes = " ".join(filter(None, ["number" if numeric else "", cell.mark]))
    attributes = key + (f' class="{classes}"' if classes else "")
    return (
        f'<th scope="row"{attributes}>{escape(cell.text)}</th>'
        if column == 0
        else f"<td{attributes}>{escape(cell.text)}</td>"
    )
