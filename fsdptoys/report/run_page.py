"""Sections of the HTML page of one run."""

from markupsafe import Markup

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import PROFILE_FOLDER, RESUMES_FILE
from fsdptoys.metrics.resume_log import RESUME_HEADINGS, flatten, read_resumes, resume_row
from fsdptoys.metrics.run_environment import hardware_line
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import UNITS, value_text

from .memory_timeline import read_timeline
from .page_parts import (
    HtmlCell,
    Section,
    definitions_section,
    environment_section,
    notes_html,
    prediction_section,
    render,
    table,
)
from .result_file import main_numbers, operators
from .run_figures import draw_run, draw_timeline, is_profiled
from .runs_table import Record


def run_page(record: Record, run: RecordedRun, folder: str) -> tuple[list[Section], list[Picture]]:
    """Build the sections and figures of a run with at least one step; ``folder`` is the relative
    path of the PNGs."""
    memory: list[Picture] = []
    problem = []
    try:
        timeline = read_timeline(run.path / PROFILE_FOLDER, run.device_type)
        memory = [draw_timeline(timeline)] if timeline is not None else []
    except ConfigError as mistake:
        problem = [f"{mistake}."]
    curves = draw_run(run)
    curves_html = render("figures", curves[:1], folder)
    curves_html += render("pair", render("figures", curves[1:], folder))
    memory_html = render("paragraphs", problem, "note") + render("figures", memory, folder)
    if not memory:
        memory_html += render("paragraphs", [_how_to_record_memory(run)])
    sections = [
        Section("glance", "At a glance", _glance(record, run) + notes_html([run])),
        Section("curves", "Curves", curves_html),
        Section("memory-by-category", "Memory by category", memory_html + _memory_table(run)),
        prediction_section([(record.name, run)]),
        Section("operators", "Where the time goes", _operators(run)),
        Section("starts", "Starts and checkpoints", _starts(run)),
        Section("settings", "Settings", _settings(run)),
        environment_section([(record.name, run)]),
        definitions_section([run]),
    ]
    return sections, [*curves, *memory]


def _glance(record: Record, run: RecordedRun) -> Markup:
    steps = f"{run.results.steps:,} steps"
    cards = [("status", record.status.value, record.reason or steps), *main_numbers(run.results)]
    lines = [hardware_line(run.environment)]
    if is_profiled(run):
        lines.append("Steps under the profiler are slower; medians include them.")
    return render("paragraphs", lines) + render("cards", cards)


def _how_to_record_memory(run: RecordedRun) -> str:
    on_cpu = run.device_type == "cpu"
    how = "profile.enabled=true profile.memory=true" if on_cpu else "profile.snapshot=true"
    return f"There is no memory history: {how} records one around a few steps."


def _memory_table(run: RecordedRun) -> Markup:
    """Table of the predicted memory by category; empty without a prediction."""
    if run.prediction is None:
        return Markup()
    memory = run.prediction.memory
    total = sum(memory.categories.values()) or 1
    rows = [
        [
            kind.value,
            HtmlCell(f"{size / 2**20:,.2f}", size),
            HtmlCell(f"{size / total:.1%}", size / total),
        ]
        for kind, size in sorted(memory.categories.items(), key=lambda item: -item[1])
    ]
    caption = (
        "Predicted before the run: bytes on a rank at the peak of a step, which falls into its "
        f"{memory.peak_phase}; {memory.peak_bytes / 2**20:,.2f} MiB in all."
    )
    return table("categories", caption, ("category", "MiB", "share"), rows, sortable=True)


def _operators(run: RecordedRun) -> Markup:
    rows = operators(run.result, run.path)
    if not rows:
        why = (
            "The run has no table of operators: profile.enabled=true traces a few steps and lists "
            "the operators that take most time."
        )
        return render("paragraphs", [why])
    cells: list[list[HtmlCell | str]] = [
        [row[0], *(HtmlCell(text, _size(text)) for text in row[1:])] for row in rows[1:]
    ]
    caption = (
        "Operators with the largest self time over the traced steps, as the run's profiler found "
        "them; steps that are traced are slower than others."
    )
    return table("operators-table", caption, rows[0], cells, sortable=True)


def _size(text: str) -> float | str | None:
    value, _, unit = text.replace(",", "").partition(" ")
    try:
        return float(value) * UNITS.get(unit, 1)
    except ValueError:
        return text or None


def _starts(run: RecordedRun) -> Markup:
    html = render("paragraphs", ["The run had one start."])
    if rows := [resume_row(resume) for resume in read_resumes(run.path / RESUMES_FILE)]:
        caption = "Each time that the run resumed, or restarted over earlier files."
        html = table("resumes", caption, RESUME_HEADINGS, rows)
    every = look_up(run.tree, "checkpoint.every")
    if not isinstance(every, int):
        return html
    text = "only on a signal (checkpoint.every=0)"
    if every:
        text = f"every {every:,} steps, {value_text(look_up(run.tree, 'checkpoint.form'))}"
    return html + render("paragraphs", [f"Checkpoints: {text}."])


def _settings(run: RecordedRun) -> Markup:
    rows = [[key, value_text(value)] for key, value in flatten(run.tree)]
    caption = "Every setting of the run, from config.yaml."
    html = table("settings-table", caption, ("setting", "value"), rows, filterable=True, keys=True)
    return render("details", "All settings", html)
