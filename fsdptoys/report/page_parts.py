"""Parts shared by both HTML pages: cards, figures, environments, predictions, definitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.metrics.prediction import FLAGGED
from fsdptoys.metrics.resume_log import flatten
from fsdptoys.metrics.summary import definitions
from fsdptoys.train.recorded_run import RecordedRun

from .figures import Picture
from .html import HtmlCell, bullets, escape, table

NOT_PREDICTED = (
    "<p>There is no prediction: a run predicts its time and memory with plan.predict=true and a hardware profile, that "
    "of its device or one that plan.hardware names.</p>"
)

OF_EACH_RUN = ("started_at", "command")  # Keys of an environment that always differ and are not compared


@dataclass(frozen=True)
class Section:
    """A section of a page, with a linkable heading."""

    name: str
    heading: str
    body: str  # HTML


def cards(entries: Sequence[tuple[str, str, str]]) -> str:
    """Cards of the main numbers, each with title, value and a smaller line below."""
    return (
        '<dl class="cards">'
        + "".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
            for what, value, more in entries
        )
        + "</dl>"
    )


def figure_html(picture: Picture, folder: str) -> str:
    """Element of a figure: title, link to the PNG in ``folder``, placeholder for the page's script, and caption."""
    return (
        f'<figure id="{picture.name}"><h3>{escape(picture.title)} '
        f'<a href="{escape(folder)}/{picture.name}.png" aria-label="PNG: {escape(picture.title)}">PNG</a></h3>'
        f'<div class="plot" id="plot-{picture.name}" role="img" aria-label="{escape(picture.alt)}"></div><div></div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def figures_html(pictures: Sequence[Picture], folder: str) -> str:
    """Elements of several figures; see :func:`figure_html`."""
    return "".join(figure_html(picture, folder) for picture in pictures)


def environment_section(runs: Sequence[tuple[str, RecordedRun]]) -> Section:
    """Environments of the runs; values that differ come first, marked and listed by run."""
    flats = [(name, dict(flatten(run.environment))) for name, run in runs]
    keys = list(dict.fromkeys(key for _, flat in flats for key in flat if key not in OF_EACH_RUN or len(flats) == 1))
    single = len(flats) == 1
    rows: list[list[HtmlCell | str]] = []
    same: list[list[HtmlCell | str]] = []
    for key in keys:
        values = group_by_value(flats, key)
        if len(values) == 1:
            same.append([key, next(iter(values)), *([] if single else [HtmlCell("equal", mark="quiet nowrap")])])
        else:
            text = "; ".join(f"{value}: {', '.join(names)}" for value, names in values.items())
            rows.append([key, HtmlCell(text, mark="warn"), HtmlCell("differs", mark="warn nowrap")])
    caption = "Versions, machine and the environment variables that affect speed, as recorded by the runs."
    headings = ("key", "value") if single else ("key", "value", "among the runs")
    return Section("environment", "Environment", table("environments", caption, headings, rows + same, keys=True))


def group_by_value(flats: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> dict[str, list[str]]:
    """Value as text → names of the runs with it."""
    values: dict[str, list[str]] = {}
    for name, flat in flats:
        value = flat.get(key)
        values.setdefault("unknown" if value is None else str(value), []).append(name)
    return values


def prediction_table(runs: Sequence[tuple[str, RecordedRun]]) -> str:
    """Table of predicted and measured values; empty without predictions."""
    rows: list[list[HtmlCell | str]] = []
    several = len(runs) > 1
    for name, run in runs:
        for each in run.prediction_errors():
            difference = HtmlCell(
                f"{each.difference:+.1%}" + f", over {FLAGGED:.0%}" * each.flagged,
                each.difference,
                "warn" * each.flagged,
            )
            numbers = [number(each.predicted, unit=each.unit), number(each.measured, unit=each.unit), difference]
            rows.append([*([name] if several else []), each.quantity, *numbers])
    if not rows:
        return ""
    methods = sorted(
        {f"{run.prediction.method}, plan.hardware={run.prediction.hardware}" for _, run in runs if run.prediction}
    )
    caption = f"Predictions: {'; '.join(methods)}. The difference is relative to the measurement."
    headings = [*(["run"] if several else []), "measure", "predicted", "measured", "difference"]
    return table("predictions", caption, headings, rows, sortable=several)


def number(value: float | None, digits: int = 4, unit: str = "") -> HtmlCell:
    """HtmlCell of a number with ``digits`` significant digits, sorted by its exact value."""
    if value is None:
        return HtmlCell("")
    if value != value:
        return HtmlCell("not a number", mark="warn")
    text = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return HtmlCell(f"{text} {unit}".strip(), value)


def definitions_section(runs: Sequence[RecordedRun]) -> Section:
    """Definitions of the numbers."""
    predicted = any(run.prediction is not None for run in runs)
    lines = definitions([run.results for run in runs], predicted=predicted)
    return Section("definitions", "How the numbers are measured", bullets(lines))


def notes_html(runs: Sequence[RecordedRun]) -> str:
    """Notes on unreadable files of the runs."""
    return "".join(f'<p class="note">{escape(note)}.</p>' for run in runs for note in run.notes)
