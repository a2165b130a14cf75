"""Sections of the HTML page of one run."""

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import PROFILE_FOLDER, RESUMES_FILE
from fsdptoys.metrics.resume_log import RESUME_HEADINGS, flatten, read_resumes, resume_row
from fsdptoys.metrics.run_environment import hardware_line
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import UNITS, gib_text, value_text

from .memory_timeline import read_timeline
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
from .result_file import operators
from .run_figures import draw_run, is_profiled
from .runs_table import Record


def run_page(record: Record, run: RecordedRun, folder: str) -> tuple[list[Section], list[Picture]]:
    """Build the sections and figures of a run with at least one step; ``folder`` is the relative
    path of the PNGs."""
    problem = ""
    try:
        timeline = read_timeline(run.path / PROFILE_FOLDER, run.device_type)
    except ConfigError as mistake:
        timeline, problem = None, f'<p class="note">{escape(mistake)}.</p>'
    pictures = draw_run(run, timeline)
    loss, *curves = (picture for picture in pictures if picture.name != "memory_timeline")
    curves_html = (
        f'{figures_html([loss], folder)}<div class="pair">{figures_html(curves, folder)}</div>'
    )
    memory = [picture for picture in pictures if picture.name == "memory_timeline"]
    sections = [
        Section("glance", "At a glance", _glance(record, run) + notes_html([run])),
        Section("curves", "Curves", curves_html),
        Section("memory-by-category", "Memory by category", problem + _memory(run, memory, folder)),
        prediction_section([(record.name, run)]),
        Section("operators", "Where the time goes", _operators(run)),
        Section("starts", "Starts and checkpoints", _starts(run)),
        Section("settings", "Settings", _settings(run)),
        environment_section([(record.name, run)]),
        definitions_section([run]),
    ]
    return sections, pictures


def _glance(record: Record, run: RecordedRun) -> str:
    results = run.results
    entries = [("status", record.status.value, record.reason or f"{results.steps:,} steps")]
    if results.last_loss is not None:
        held_out = f", held out {results.eval_loss:.4f}" if results.eval_loss is not None else ""
        entries.append(
            (
                "last loss",
                f"{results.last_loss:.4f}",
                f"nats per token; first {results.first_loss:.4f}{held_out}",
            )
        )
    if results.step_time_seconds is not None and results.tokens_per_second is not None:
        spread = results.step_time_seconds
        between = f"10% to 90%: {spread.p10 * 1e3:,.4g} to {spread.p90 * 1e3:,.4g} ms"
        traced = "; with traced steps, which are slower" * is_profiled(run)
        entries.append(("median step", f"{spread.median * 1e3:,.4g} ms", between + traced))
        entries.append(
            ("tokens/s, all ranks", f"{results.tokens_per_second.median:,.0f}", "median")
        )
    if results.mfu is not None:
        entries.append(("MFU", f"{results.mfu.median:.1%}", "median"))
    if results.data_stall is not None:
        entries.append(
            ("waiting for data", f"{results.data_stall:.2%}", "of the step time, on rank 0")
        )
    if results.memory_reserved_gib is not None:
        peak = (
            f"{gib_text(results.memory_peak_gib)} at the peak in tensors"
            if results.memory_peak_gib
            else ""
        )
        entries.append(("device memory reserved", gib_text(results.memory_reserved_gib), peak))
    elif results.memory_peak_gib is not None:
        parts = ", ".join(f"{name} {gib_text(size)}" for name, size in results.memory_parts.items())
        entries.append(("peak memory in tensors", gib_text(results.memory_peak_gib), parts))
    if results.memory_reserved_gib is None and results.resident_set_gib is not None:
        highest = results.resident_set_peak_gib or results.resident_set_gib
        entries.append(("resident set, highest", gib_text(highest), "of rank 0, Python included"))
    for what, count in (("skipped steps", results.skipped_steps), ("loss spikes", results.spikes)):
        if count:
            entries.append((what, f"{count:,}", ""))
    return f"<p>{escape(hardware_line(run.environment))}</p>{cards(entries)}"


def _memory(run: RecordedRun, pictures: list[Picture], folder: str) -> str:
    parts = [figures_html(pictures, folder)]
    if not pictures:
        how = (
            "profile.enabled=true profile.memory=true"
            if run.device_type == "cpu"
            else "profile.snapshot=true"
        )
        parts.append(f"<p>There is no memory history: {how} records one around a few steps.</p>")
    if run.prediction is not None:
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
        parts.append(
            table("categories", caption, ("category", "MiB", "share"), rows, sortable=True)
        )
    return "".join(parts)


def _operators(run: RecordedRun) -> str:
    rows = operators(run.result, run.path)
    if not rows:
        why = (
            "it has no summary with a table of operators"
            if (run.path / PROFILE_FOLDER).is_dir()
            else (
                "profile.enabled=true traces a few steps and lists the operators that take most "
                "time"
            )
        )
        return f"<p>The run has no profile: {why}.</p>"
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


def _starts(run: RecordedRun) -> str:
    html = "<p>The run had one start.</p>"
    if rows := [resume_row(resume) for resume in read_resumes(run.path / RESUMES_FILE)]:
        caption = "Each time that the run resumed, or restarted over earlier files."
        html = table("resumes", caption, RESUME_HEADINGS, rows)
    every = look_up(run.tree, "checkpoint.every")
    if not isinstance(every, int):
        return html
    if every:
        form = escape(value_text(look_up(run.tree, "checkpoint.form")))
        return f"{html}<p>Checkpoints: every {every:,} steps, {form}.</p>"
    return f"{html}<p>Checkpoints: only on a signal (checkpoint.every=0).</p>"


def _settings(run: RecordedRun) -> str:
    rows = [[key, value_text(value)] for key, value in flatten(run.tree)]
    caption = "Every setting of the run, from config.yaml."
    html = table("settings-table", caption, ("setting", "value"), rows, filterable=True, keys=True)
    return f"<details><summary>All settings</summary>{html}</details>"
