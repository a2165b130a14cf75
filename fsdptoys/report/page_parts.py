"""Parts of both HTML pages, with all text from runs escaped: tables, cards, figures, environments,
predictions."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.metrics.prediction import prediction_rows
from fsdptoys.metrics.resume_log import flatten
from fsdptoys.metrics.summary import definitions
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.text import printable

NOT_PREDICTED = (
    "<p>There is no prediction: a run predicts its time and memory with plan.predict=true and a "
    "hardware profile, that of its device or one that plan.hardware names.</p>"
)

OF_EACH_RUN = (
    "started_at",
    "command",
)  # Keys of an environment that always differ and are not compared


@dataclass(frozen=True)
class HtmlCell:
    """Text and sort key of one cell."""

    text: str
    sort: float | str | None = None  # Sort key; None sorts last in either direction
    mark: str = ""
    """CSS classes: ``warn`` highlights, ``quiet`` dims, ``nowrap`` keeps the text on one line."""


def escape(text: object) -> str:
    """Escape for elements and attributes; control characters and lone surrogates appear as in
    Python's ``repr``."""
    return html.escape(printable(str(text)))


def rich(text: str) -> str:
    """Escape, and convert Markdown's code and strong marks.

    For text of this package only: names of runs may contain these characters.
    """
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)


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
    """A table with the element id ``name``, in a box that scrolls horizontally; texts are escaped.

    Args:
        headings: column headings; cells of the first column are row headings.
        rows: cells, or texts sorted as they are.
        sortable: whether headings are buttons that sort.
        filterable: whether a field above the table filters rows.
        keys: whether the table has few columns, of keys and long values that wrap.
    """

    def is_number(cell: object) -> bool:
        return isinstance(cell, HtmlCell) and isinstance(cell.sort, (int, float))

    numeric = [any(is_number(row[column]) for row in rows) for column in range(len(headings))]
    head = "".join(
        f'<th scope="col"{" class=number" * numeric[column]}{" aria-sort=none" * sortable}>'
        + (
            f'<button type="button">{rich(text)}<span aria-hidden="true"></span></button>'
            if sortable
            else rich(text)
        )
        + "</th>"
        for column, text in enumerate(headings)
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(cell, column, numeric[column]) for column, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    field = (
        f'<p class="filter"><label for="{name}-filter">Filter rows</label> '
        f'<input id="{name}-filter" type="search" data-table="{name}" autocomplete="off" '
        f'spellcheck="false" aria-describedby="{name}-help"> '
        f'<output for="{name}-filter">{len(rows)} of {len(rows)} rows</output> '
        f'<span class="help" id="{name}-help">All words must occur in a row; a word with a minus '
        "before it must not."
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
    text = escape(cell.text)
    return f"<td{attributes}>{text}</td>" if column else f'<th scope="row"{attributes}>{text}</th>'


@dataclass(frozen=True)
class Section:
    """A section of a page, with a linkable heading."""

    name: str
    heading: str
    body: str  # HTML


def cards(entries: Sequence[tuple[str, str, str]]) -> str:
    """Cards of the main numbers, each with title, value and a smaller line below."""
    items = (
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for what, value, more in entries
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def figures_html(pictures: Sequence[Picture], folder: str) -> str:
    """Elements of figures: title, link to the PNG in ``folder``, placeholder for the page's script,
    and caption."""
    return "".join(
        f'<figure id="{picture.name}"><h3>{escape(picture.title)} '
        f'<a href="{escape(folder)}/{picture.name}.png" '
        f'aria-label="PNG: {escape(picture.title)}">PNG</a></h3>'
        f'<div class="plot" id="plot-{picture.name}" role="img" '
        f'aria-label="{escape(picture.alt)}"></div><div></div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    )


def environment_section(runs: Sequence[tuple[str, RecordedRun]]) -> Section:
    """Environments of the runs; values that differ come first, marked and listed by run."""
    flats = [(name, dict(flatten(run.environment))) for name, run in runs]
    single = len(flats) == 1
    rows: list[list[HtmlCell | str]] = []
    same: list[list[HtmlCell | str]] = []
    for key in dict.fromkeys(
        key for _, flat in flats for key in flat if key not in OF_EACH_RUN or single
    ):
        values: dict[str, list[str]] = {}
        for name, flat in flats:
            values.setdefault("unknown" if flat.get(key) is None else str(flat[key]), []).append(
                name
            )
        if len(values) == 1:
            same.append(
                [key, *values, *([] if single else [HtmlCell("equal", mark="quiet nowrap")])]
            )
        else:
            text = "; ".join(f"{value}: {', '.join(names)}" for value, names in values.items())
            rows.append([key, HtmlCell(text, mark="warn"), HtmlCell("differs", mark="warn nowrap")])
    caption = (
        "Versions, machine and the environment variables that affect speed, as recorded by the "
        "runs."
    )
    headings = ("key", "value") if single else ("key", "value", "among the runs")
    return Section(
        "environment",
        "Environment",
        table("environments", caption, headings, rows + same, keys=True),
    )


def prediction_section(runs: Sequence[tuple[str, RecordedRun]], figures: str = "") -> Section:
    """Table of predicted and measured values, below ``figures``."""
    rows: list[list[HtmlCell | str]] = []
    several = len(runs) > 1
    for name, run in runs:
        errors = run.prediction_errors()
        for error, texts in zip(errors, prediction_rows(errors), strict=True):
            quantity, predicted, measured, difference = texts
            rows.append(
                [
                    *([name] if several else []),
                    quantity,
                    HtmlCell(predicted, error.predicted),
                    HtmlCell(measured, error.measured),
                    HtmlCell(difference.replace("*", ""), error.difference, "warn" * error.flagged),
                ]
            )
    body = NOT_PREDICTED
    if rows:
        methods = {
            f"{run.prediction.method}, plan.hardware={run.prediction.hardware}"
            for _, run in runs
            if run.prediction
        }
        caption = (
            f"Predictions: {'; '.join(sorted(methods))}. The difference is relative to the "
            "measurement."
        )
        headings = [*(["run"] if several else []), "measure", "predicted", "measured", "difference"]
        body = figures + table("predictions", caption, headings, rows, sortable=several)
    return Section("prediction", "Predicted and measured", body)


def definitions_section(runs: Sequence[RecordedRun]) -> Section:
    """Definitions of the numbers."""
    predicted = any(run.prediction is not None for run in runs)
    lines = definitions([run.results for run in runs], predicted=predicted)
    items = "".join(f"<li>{rich(line)}</li>" for line in lines)
    return Section("definitions", "How the numbers are measured", f"<ul>{items}</ul>")


def notes_html(runs: Sequence[RecordedRun]) -> str:
    """Notes on unreadable files of the runs."""
    return "".join(f'<p class="note">{escape(note)}.</p>' for run in runs for note in run.notes)
