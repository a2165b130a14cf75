"""Parts of both HTML pages, rendered with the macros of ``page.html``: tables, cards, figures,
environments, predictions.

The template escapes every text of a run.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from markupsafe import escape as escape_html

from fsdptoys.metrics.definitions import definitions
from fsdptoys.metrics.prediction import prediction_rows
from fsdptoys.metrics.resume_log import flatten
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import printable, value_text

NOT_PREDICTED = (
    "There is no prediction: a run predicts its time and memory with plan.predict=true and a "
    "hardware profile, that of its device or one that plan.hardware names."
)

OF_EACH_RUN = ("started_at", "command")
"""Keys of an environment that always differ and are not compared."""


@dataclass(frozen=True)
class HtmlCell:
    """Text and sort key of one cell."""

    text: str
    sort: float | str | None = None  # Sort key; None sorts last in either direction
    mark: str = ""
    """CSS classes: ``warn`` highlights, ``quiet`` dims, ``nowrap`` keeps the text on one line."""


CellRows = list[list[HtmlCell | str]]
"""Rows of a table; texts are sorted as they are."""


def value_cell(value: object, text: str | None = None, mark: str = "") -> HtmlCell:
    """Cell of any value, sorted as a number if it is a finite one."""
    text = value_text(value) if text is None else text
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return HtmlCell(text, text if value is not None else None, mark)
    return HtmlCell(text, value if math.isfinite(value) else None, mark)


@dataclass(frozen=True)
class Section:
    """A section of a page, with a linkable heading."""

    name: str
    heading: str
    body: Markup


def escape(text: object) -> Markup:
    """Escape for elements and attributes; control characters and lone surrogates appear as in
    Python's ``repr``."""
    return text if isinstance(text, Markup) else escape_html(printable(str(text)))


def rich(text: str) -> Markup:
    """Escape, and convert Markdown's code and strong marks.

    For text of this package only: names of runs may contain these characters.
    """
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))


@functools.cache
def _macros() -> object:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=escape
    )
    environment.filters["rich"] = rich
    return environment.get_template("page.html").module


def render(macro: str, *arguments: object) -> Markup:
    """Render a macro of ``page.html``."""
    return Markup(getattr(_macros(), macro)(*arguments))


def table(
    name: str,
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[HtmlCell | str]],
    *,
    sortable: bool = False,
    filterable: bool = False,
    keys: bool = False,
) -> Markup:
    """A table with the element id ``name``, in a box that scrolls horizontally.

    Args:
        headings: column headings; cells of the first column are row headings.
        rows: cells, or texts sorted as they are.
        sortable: whether headings are buttons that sort.
        filterable: whether a field above the table filters rows.
        keys: whether the table has few columns, of keys and long values that wrap.
    """
    cells = [
        [
            cell if isinstance(cell, HtmlCell) else HtmlCell(cell, cell or None)
            for cell in row
        ]
        for row in rows
    ]
    numeric = [
        any(isinstance(row[column].sort, (int, float)) for row in cells)
        for column in range(len(headings))
    ]
    return render(
        "table", name, caption, headings, cells, numeric, sortable, filterable, keys
    )


def environment_section(runs: Sequence[tuple[str, RecordedRun]]) -> Section:
    """Environments of the runs; values that differ come first, marked and listed by run."""
    flats = {name: dict(flatten(run.environment)) for name, run in runs}
    single = len(flats) == 1
    differing: CellRows = []
    same: CellRows = []
    for key in dict.fromkeys(key for flat in flats.values() for key in flat):
        values: dict[str, list[str]] = {}
        for name, flat in flats.items():
            value = "unknown" if flat.get(key) is None else str(flat[key])
            values.setdefault(value, []).append(name)
        if single:
            same.append([key, *values])
        elif len(values) == 1:
            same.append([key, *values, HtmlCell("equal", mark="quiet nowrap")])
        elif key not in OF_EACH_RUN:
            text = "; ".join(
                f"{value}: {', '.join(names)}" for value, names in values.items()
            )
            mark = HtmlCell("differs", mark="warn nowrap")
            differing.append([key, HtmlCell(text, mark="warn"), mark])
    caption = (
        "Versions, machine and the environment variables that affect speed, as recorded by the "
        "runs."
    )
    headings = ("key", "value") if single else ("key", "value", "among the runs")
    body = table("environments", caption, headings, differing + same, keys=True)
    return Section("environment", "Environment", body)


def prediction_section(
    runs: Sequence[tuple[str, RecordedRun]], figures: Markup | None = None
) -> Section:
    """Table of predicted and measured values, below ``figures``."""
    rows: CellRows = []
    methods = set()
    several = len(runs) > 1
    for name, run in runs:
        errors = run.prediction_errors()
        if run.prediction is not None:
            methods.add(
                f"{run.prediction.method}, plan.hardware={run.prediction.hardware}"
            )
        for error, texts in zip(errors, prediction_rows(errors), strict=True):
            quantity, predicted, measured, difference = texts
            rows.append(
                [
                    *([name] if several else []),
                    quantity,
                    HtmlCell(predicted, error.predicted),
                    HtmlCell(measured, error.measured),
                    HtmlCell(
                        difference.replace("*", ""),
                        error.difference,
                        "warn" * error.flagged,
                    ),
                ]
            )
    body = render("paragraphs", [NOT_PREDICTED])
    if rows:
        caption = (
            f"Predictions: {'; '.join(sorted(methods))}. The difference is relative to the "
            "measurement."
        )
        headings = [
            *(["run"] if several else []),
            "measure",
            "predicted",
            "measured",
            "difference",
        ]
        body = (figures or Markup()) + table(
            "predictions", caption, headings, rows, sortable=several
        )
    return Section("prediction", "Predicted and measured", body)


def definitions_section(runs: Sequence[RecordedRun]) -> Section:
    """Definitions of the numbers."""
    predicted = any(run.prediction is not None for run in runs)
    lines = definitions([run.results for run in runs], predicted=predicted)
    body = render("items", [rich(line) for line in lines])
    return Section("definitions", "How the numbers are measured", body)


def notes_html(runs: Sequence[RecordedRun]) -> Markup:
    """Notes on unreadable files of the runs."""
    return render(
        "paragraphs", [f"{note}." for run in runs for note in run.notes], "note"
    )
