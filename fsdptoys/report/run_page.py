"""Sections of the HTML page of one run."""

from markupsafe import Markup

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import PROFILE_FOLDER, RESUMES_FILE
from fsdptoys.metrics.resume_log import (
    RESUME_HEADINGS,
    flatten,
    read_resumes,
    resume_row,
)
from fsdptoys.metrics.run_environment import hardware_line
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.text import UNITS, value_text

from .breakdown_figures import PlottedRun, draw_memory_split
from .memory_timeline import read_timeline
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
)
from .result_file import main_numbers, operators
from .run_figures import draw_run, draw_timeline, is_profiled
from .runs_table import Record


def run_page(
    record: Record, run: RecordedRun, folder: str
) -> tuple[list[Section], list[Picture]]:
    """Build the sections and figures of a run with at least one step; ``folder`` is the relative
    path of the PNGs."""
    memory: list[Picture] = []
    timeline = None
    problem = []
    try:
        timeline = read_timeline(run.path / PROFILE_FOLDER, run.device_type)
        memory = [draw_timeline(timeline)] if timeline is not None else []
    except ConfigError as mistake:
        problem = [f"{mistake}."]
    if run.prediction is not None and (
        split := draw_memory_split([PlottedRun("run", run, ())])
    ):
        memory.append(split)
    curves = draw_run(run)
    curves_html = render("figures", curves[:1], folder)
    curves_html += render("pair", render("figures", curves[1:], folder))
    memory_html = render("paragraphs", problem, "note") + render(
        "figures", memory, folder
    )
    if not timeline:
        memory_html += render("paragraphs", [_how_to_record_memory(run)])
    sections = [
        Section("glance", "At a glance", _glance(record, run) + notes_html([run])),
        Section("curves", "Curves", curves_html),
        Section("memory-by-category", "Memory by category", memory_html),
        prediction_section([(record.name, run)]),
        Section("operators", "Where the time goes", _operators(run)),
        Section("starts", "Starts", _starts(run)),
        Section("settings", "Settings", _settings(run)),
        environment_section([(record.name, run)]),
        definitions_section([run]),
    ]
    return sections, [*curves, *memory]


def _glance(record: Record, run: RecordedRun) -> Markup:
    steps = f"{run.results.steps:,} steps"
    cards = [
        ("status", record.status.value, record.reason or steps),
        *main_numbers(run.results),
    ]
    lines = [hardware_line(run.environment)]
    if is_profiled(run):
        lines.append("Steps under the profiler are slower; medians include them.")
    return render("paragraphs", lines) + render("cards", cards)


def _how_to_record_memory(run: RecordedRun) -> str:
    on_cpu = run.device_type == "cpu"
    how = (
        "profile.enabled=true profile.memory=true"
        if on_cpu
        else "profile.snapshot=true"
    )
    return f"There is no memory history: {how} records one around a few steps."


def _operators(run: RecordedRun) -> Markup:
    rows = operators(run.result, run.path)
    if not rows:
        why = (
            "The run has no table of operators: profile.enabled=true traces a few steps and lists "
            "the operators that take most time."
        )
        return render("paragraphs", [why])
    cells: CellRows = [
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
    return html


def _settings(run: RecordedRun) -> Markup:
    rows = [[key, value_text(value)] for key, value in flatten(run.tree)]
    caption = "Every setting of the run, from config.yaml."
    html = table(
        "settings-table",
        caption,
        ("setting", "value"),
        rows,
        filterable=True,
        keys=True,
    )
    return render("details", "All settings", html)
