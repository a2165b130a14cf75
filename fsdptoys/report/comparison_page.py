"""Sections of the HTML page of several runs."""

import math
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from fsdptoys.sweep import JobStatus
from fsdptoys.sweep.folder import label_of
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.text import gib_text, value_text

from .breakdown_figures import PlottedRun
from .columns import TableCell
from .comparison_figures import MEASURES, draw_comparison, measured_memory
from .page_parts import (
    CellRows,
    HtmlCell,
    Section,
    definitions_section,
    environment_section,
    notes_html,
    prediction_section,
    render,
    table,
    value_cell,
)
from .runs_table import Collection, Record
from .setting_diff import as_override, differing, own_key
from .table import MARK, Table, make_table


def comparison_page(
    collection: Collection, folder: str
) -> tuple[list[Section], list[Picture]]:
    """Build the sections and figures of a collection; ``folder`` is the relative path of the
    PNGs."""
    rows = make_table(collection)
    varied = [
        own_key(key) for record in collection.records for key in record.varied or {}
    ]
    keys = differing(rows.settings, varied)
    names = [short_name(record) for record in collection.records]
    plotted = [
        PlottedRun(
            name,
            record.run,
            tuple(as_override(key, own[key]) for key in keys if key in own),
            record.status is JobStatus.completed,
        )
        for name, record, own in zip(
            names, collection.records, rows.settings, strict=True
        )
        if record.run is not None and record.run.steps
    ]
    runs = [(one.name, one.run) for one in plotted]
    pictures = draw_comparison(plotted)
    nothing = render("paragraphs", ["No run has a step to draw."])

    def figures(*selection: str) -> Markup:
        return render(
            "figures", [one for one in pictures if one.name in selection], folder
        )

    predicted = render("pair", figures("predicted_time", "predicted_memory"))
    notes = notes_html([run for _, run in runs])
    sections = [
        Section("glance", "At a glance", _glance(collection, plotted) + notes),
        Section("table", "All configurations", _rows(rows)),
        Section(
            "tradeoff", "Memory and time", figures("memory_against_time") or nothing
        ),
        Section(
            "splits",
            "Breakdown of time and memory",
            figures("time_split", "memory_split") or nothing,
        ),
        Section("curves", "Curves", figures("losses", "step_time") or nothing),
        prediction_section(runs, predicted),
        Section("differences", "Settings that differ", _differences(names, rows, keys)),
    ]
    if failed := _failed(collection, names):
        caption = "Configurations without a result, with the reason."
        headings = ("configuration", "status", "reason")
        body = table("failed-table", caption, headings, failed)
        sections.append(Section("failed", "Failed, stopped and skipped", body))
    if runs:
        sections += [
            environment_section(runs),
            definitions_section([run for _, run in runs]),
        ]
    return sections, pictures


def short_name(record: Record) -> str:
    """Chart label of a row: its name, which is unique, and what its sweep switches on."""
    labels = (_short_word(key, value) for key, value in (record.varied or {}).items())
    return value_text(" ".join([record.name, *labels]))


def _short_word(key: str, value: str) -> str:
    name = key.rpartition(".")[2]
    if value in ("false", "none", "null"):
        return ""
    if value == "true":
        return name
    return value if value.isidentifier() else f"{name}={value}"


def _glance(collection: Collection, plotted: Sequence[PlottedRun]) -> Markup:
    counts = Counter(record.status.value for record in collection.records)
    completed = counts.pop(JobStatus.completed.value, 0)
    if collection.skipped:
        counts["skipped"] = len(collection.skipped)
    others = ", ".join(f"{count} {what}" for what, count in counts.items())
    cards = [
        ("configurations done", f"{completed} of {len(collection.records)}", others)
    ]
    ranked = [one for one in plotted if one.is_finished] or plotted
    speeds = [(one.run.results.tokens_per_second, one.name) for one in ranked]
    if medians := [(speed.median, name) for speed, name in speeds if speed is not None]:
        speed, name = max(medians)
        cards.append(("fastest", f"{speed:,.0f} tokens/s", name))
    measure, memories = measured_memory(ranked)
    if measure is not None:
        pairs = zip(memories, ranked, strict=True)
        least, name = min(
            (memory, one.name) for memory, one in pairs if memory is not None
        )
        cards.append((f"least memory: {MEASURES[measure][0]}", gib_text(least), name))
    losses = [(one.run.results.mean_last_loss, one) for one in ranked]
    numeric_losses = [
        (loss, one) for loss, one in losses if loss is not None and not math.isnan(loss)
    ]
    if numeric_losses:
        loss, best = min(numeric_losses, key=lambda pair: pair[0])
        over = f"{best.name}, mean of its last {best.run.results.mean_last_steps} steps"
        cards.append(("lowest loss", f"{loss:.4f}", over))
    return render("cards", cards) + render("commands", collection.commands)


def _rows(rows: Table) -> Markup:
    cells = [
        [_html_cell(column.cells[index], record) for column in rows.columns]
        for index, record in enumerate(rows.records)
    ]
    caption = "Press a heading to sort; a third press restores the original order."
    headings = [column.heading for column in rows.columns]
    html = table("rows", caption, headings, cells, sortable=True, filterable=True)
    if rows.everywhere:
        html += render("details", "Equal in all rows", render("items", rows.everywhere))
    return html + render("items", rows.notes, "soft")


def _html_cell(cell: TableCell, record: Record) -> HtmlCell:
    off = record.status is not JobStatus.completed and cell.text == record.status.value
    return value_cell(cell.value, cell.text, "warn" * (off or cell.text.endswith(MARK)))


def _differences(
    names: Sequence[str], table_of_runs: Table, keys: Sequence[str]
) -> Markup:
    settings = table_of_runs.settings
    if not keys:
        return render("paragraphs", ["All settings are the same."])
    missing = HtmlCell("—", mark="quiet")
    rows: CellRows = [
        [name, *(value_cell(own[key]) if key in own else missing for key in keys)]
        for name, own in zip(names, settings, strict=True)
    ]
    count = len({key for own in settings for key in own})
    caption = (
        f"The {len(keys)} settings that differ, out of {count:,}; "
        "a dash where a row has no such setting, or its switch is off."
    )
    headings = ["configuration", *(f"`{key}`" for key in keys)]
    return table("differences-table", caption, headings, rows, sortable=True)


def _failed(collection: Collection, names: Sequence[str]) -> CellRows:
    """Rows of the configurations without a result: name, status and reason."""
    unfinished = [
        (name, record.status.value, record.reason or "no reason recorded")
        for record, name in zip(collection.records, names, strict=True)
        if record.status is not JobStatus.completed
    ]
    skipped = [
        (label_of(one.varied), "skipped", one.reason) for one in collection.skipped
    ]
    return [
        [name, HtmlCell(status, status, "warn" * (status != "skipped")), reason]
        for name, status, reason in [*unfinished, *skipped]
    ]
