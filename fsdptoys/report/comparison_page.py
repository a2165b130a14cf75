"""Sections of the HTML page of several runs."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.plan.search.ranking import layout, traits
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.text import gib_text, value_text

from .breakdown_figures import PlottedRun
from .columns import TableCell
from .comparison_figures import MEASURES, draw_comparison, measured_memory
from .page_parts import (
    HtmlCell,
    Section,
    cards,
    definitions_section,
    environment_section,
    escape,
    figures_html,
    notes_html,
    prediction_section,
    table,
)
from .runs_table import Collection, Record
from .setting_diff import as_word, differing, own_key
from .table import MARK, Table, make_table

MISSING_SETTING = HtmlCell("—", mark="quiet")


def comparison_page(collection: Collection, folder: str) -> tuple[list[Section], list[Picture]]:
    """Build the sections and figures of a collection; ``folder`` is the relative path of the
    PNGs."""
    rows = make_table(collection)
    settings = rows.settings
    varied = [own_key(key) for record in collection.records for key in record.varied or {}]
    keys = differing(settings, varied)
    names = short_names(collection.records)
    shown = [
        PlottedRun(
            name,
            record.run,
            tuple(as_word(key, own[key]) for key in keys if key in own),
            record.status is JobStatus.done,
        )
        for name, record, own in zip(names, collection.records, settings, strict=True)
        if record.run is not None and record.run.steps
    ]
    runs = [(one.name, one.run) for one in shown]
    pictures = draw_comparison(shown)
    named = {picture.name: picture for picture in pictures}

    def figures(*wanted: str) -> str:
        return figures_html([named[name] for name in wanted if name in named], folder)

    nothing = "<p>No run has a step to draw.</p>"
    sections = [
        Section(
            "glance",
            "At a glance",
            _glance(collection, shown) + notes_html([run for _, run in runs]),
        ),
        Section("table", "All configurations", _rows(rows)),
        Section("tradeoff", "Memory and time", figures("memory_against_time") or nothing),
        Section(
            "splits",
            "Breakdown of time and memory",
            figures("time_split", "memory_split") or nothing,
        ),
        Section("curves", "Curves", figures("losses", "step_time") or nothing),
        prediction_section(
            runs, f'<div class="pair">{figures("predicted_time", "predicted_memory")}</div>'
        ),
        Section("differences", "Settings that differ", _differences(names, settings, keys)),
    ]
    failed = _failed(collection, names)
    if failed:
        sections.append(Section("failed", "Failed, stopped and skipped", failed))
    if runs:
        sections += [environment_section(runs), definitions_section([run for _, run in runs])]
    return sections, pictures


def short_names(records: Sequence[Record]) -> list[str]:
    """Unique chart labels of the rows.

    Jobs of a sweep get their number and the enabled features, plus their varied settings where
    features are equal.
    """
    traits_of = [_traits(record.run) if record.varied is not None else "" for record in records]
    alike: dict[str, list[dict[str, str]]] = {}
    for words, record in zip(traits_of, records, strict=True):
        if words and record.varied is not None:
            alike.setdefault(words, []).append(record.varied)
    distinct = {
        key
        for group in alike.values()
        for key in group[0]
        if len({each.get(key) for each in group}) > 1
    }
    names: list[str] = []
    for words, record in zip(traits_of, records, strict=True):
        varied = record.varied or {}
        more = " ".join(
            as_word(key, value) for key, value in varied.items() if not words or key in distinct
        )
        own = value_text(f"{record.name} {words if len(alike) > 1 or not more else ''} {more}")
        count = names.count(own)
        names.append(f"{own} ({count + 1})" if count else own)
    return names


def _traits(run: RecordedRun | None) -> str:
    try:
        config = run.config() if run is not None else None
    except ConfigError:
        return ""
    return " ".join([layout(config), *traits(config)]) if config is not None else ""


def _glance(collection: Collection, shown: Sequence[PlottedRun]) -> str:
    counts = Counter(record.status.value for record in collection.records)
    done = counts.pop(JobStatus.done.value, 0)
    if collection.skipped:
        counts["skipped"] = len(collection.skipped)
    others = ", ".join(f"{count} {what}" for what, count in counts.items())
    shown = [one for one in shown if one.done] or shown
    entries = [("configurations done", f"{done} of {len(collection.records)}", others)]
    speeds = [
        (spread.median, one.name)
        for one in shown
        if (spread := one.run.results.tokens_per_second) is not None
    ]
    if speeds:
        speed, name = max(speeds, key=lambda pair: pair[0])
        entries.append(("fastest", f"{speed:,.0f} tokens/s", name))
    measure, memories = measured_memory(shown)
    if measure is not None:
        pairs = zip(memories, shown, strict=True)
        least, name = min((memory, one.name) for memory, one in pairs if memory is not None)
        entries.append((f"least memory: {MEASURES[measure][0]}", gib_text(least), name))
    losses = [
        (one.run.results.mean_last_loss, one)
        for one in shown
        if one.run.results.mean_last_loss is not None
    ]
    finite = [pair for pair in losses if pair[0] == pair[0]]
    if finite:
        loss, one = min(finite, key=lambda pair: pair[0])
        over = f"{one.name}, mean of its last {one.run.results.mean_last_steps} steps"
        entries.append(("lowest loss", f"{loss:.4f}", over))
    commands = "".join(f"<pre>{escape(command)}</pre>" for command in collection.commands)
    return cards(entries) + commands


def _rows(rows: Table) -> str:
    headings = [column.heading for column in rows.columns]
    cells = [
        [_shown(column.cells[index], record) for column in rows.columns]
        for index, record in enumerate(rows.records)
    ]
    everywhere = "".join(f"<li>{escape(text)}</li>" for text in rows.everywhere)
    same = (
        f"<details><summary>Equal in all rows</summary><ul>{everywhere}</ul></details>"
        if everywhere
        else ""
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in rows.notes)
    caption = "Press a heading to sort; a third press restores the original order."
    made = table("rows", caption, headings, cells, sortable=True, filterable=True)
    return f"{made}{same}<ul class=soft>{notes}</ul>"


def _shown(cell: TableCell, record: Record) -> HtmlCell:
    value = cell.value
    if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
        value = cell.text
    elif isinstance(value, float) and not math.isfinite(value):
        value = None
    off = record.status is not JobStatus.done and cell.text == record.status.value
    return HtmlCell(cell.text, value, "warn" * (off or cell.text.endswith(MARK)))


def _setting_cell(value: Any) -> HtmlCell:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return HtmlCell(value_text(value), float(value) if is_number else value_text(value))


def _differences(names: Sequence[str], settings: Sequence[dict], keys: Sequence[str]) -> str:
    if not keys:
        return "<p>All settings are the same.</p>"
    rows: list[list[HtmlCell | str]] = [
        [name, *(_setting_cell(own[key]) if key in own else MISSING_SETTING for key in keys)]
        for name, own in zip(names, settings, strict=True)
    ]
    count = len({key for own in settings for key in own})
    caption = (
        f"The {len(keys)} settings that differ, out of {count:,}; "
        "a dash where a row has no such setting, or its switch is off."
    )
    return table(
        "differences-table",
        caption,
        ["configuration", *(f"`{key}`" for key in keys)],
        rows,
        sortable=True,
    )


def _failed(collection: Collection, names: Sequence[str]) -> str:
    rows: list[list[HtmlCell | str]] = [
        [
            name,
            HtmlCell(record.status.value, record.status.value, "warn"),
            record.reason or "no reason recorded",
        ]
        for record, name in zip(collection.records, names, strict=True)
        if record.status is not JobStatus.done
    ]
    rows += [
        [
            " ".join(f"{key}={value}" for key, value in one.varied.items()),
            HtmlCell("skipped", "skipped"),
            one.reason,
        ]
        for one in collection.skipped
    ]
    caption = "Configurations without a result, with the reason."
    return (
        table("failed-table", caption, ("configuration", "status", "reason"), rows) if rows else ""
    )
