"""Rendering of ``summary.md``: results, definitions of numbers, environment and settings."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdptoys.utils.tables import markdown_table
from fsdptoys.utils.text import gib_text, size_text, value_text

from .compilation import compilation_line, recompilation_rows
from .layout import layout_rows
from .prediction import prediction_rows
from .results import Operator, ProfileResult, RunResult, RunResults, Spread
from .resume_log import RESUME_HEADINGS, flatten, resume_row
from .step import RoutingMetrics

PREDICTION_HEADINGS = ("quantity", "predicted", "measured", "difference")
DEFAULTS_LEFT_OUT = "Settings at their defaults are left out; `config.yaml` has all."


def render_summary(run: RunResult, defaults: Mapping[str, Any] = {}) -> str:
    """Render the results of a run as Markdown, without the settings at their ``defaults`` (key →
    value)."""
    results = run.steps
    resumes = run.resumes
    compilation = run.compilation
    routing = run.steps.routing
    last = results.mean_last_steps
    skipped = results.skipped_steps
    held_out = results.eval_loss
    of_last_start = " of the last start" * bool(resumes)
    rows: list[tuple[str, str | None]] = [
        ("steps", ending_line(run)),
        ("first loss", _nats(results.first_loss)),
        ("last loss", _nats(results.last_loss)),
        (
            f"mean loss of the last {last} steps{' without skipped ones' * bool(skipped)}",
            "every step was skipped"
            if skipped and not last
            else _nats(results.mean_last_loss),
        ),
        ("skipped steps", str(skipped) if skipped else None),
        ("loss scale", _loss_scale(results)),
        ("loss spikes", str(results.spikes) if results.spikes else None),
        *(
            [(f"held-out loss after step {results.eval_step}", _nats(held_out))]
            if held_out is not None
            else ()
        ),
        *(
            (f"reference: {value_text(label)}", _nats(nats))
            for label, nats in run.references_nats.items()
        ),
        ("step time", _spread(results.step_time_seconds, 1e3, " ms")),
        ("tokens/s, all ranks", _spread(results.tokens_per_second, digits=0)),
        ("TFLOP/s per rank", _spread(results.tflops_per_second_per_rank, digits=3)),
        ("MFU", _spread(results.mfu, 100, " %", digits=1) if results.mfu else None),
        (
            "waiting for data",
            None
            if results.data_stall is None
            else f"{results.data_stall:.2%} of the step time",
        ),
        ("peak device memory of rank 0", _peak(results)),
        (
            "device memory of rank 0 after the last step",
            _gib(results.memory_allocated_gib),
        ),
        (
            "offloaded by rank 0, in the host's place",
            _gib(results.memory_host_gib or None),
        ),
        ("largest resident set of rank 0 after a step", _gib(results.resident_set_gib)),
        ("peak resident set of rank 0", _gib(results.resident_set_peak_gib)),
        *(_routing_rows(routing) if routing is not None else ()),
        (
            "compiler, rank 0" + of_last_start,
            value_text(compilation_line(compilation)) if compilation else None,
        ),
        ("wall time" + of_last_start, f"{run.wall_seconds:.1f} s"),
    ]
    configuration = [*_flat_rows(run.environment), *_flat_rows(run.settings, defaults)]
    recompilations = recompilation_rows(compilation) if compilation else []
    resume_rows = []
    for resume in resumes:
        time, start, checkpoint, ranks, *more = resume_row(resume)
        resume_rows.append([time, start, _code(checkpoint), ranks, *map(_code, more)])
    layout = layout_rows(run.layout) if run.layout is not None else []
    files = [(f"`{name}`", content) for name, content in run.files.items()]
    parts = [
        f"# {value_text(run.title)}",
        _table(
            "Results",
            ("result", "value"),
            [(name, text) for name, text in rows if text is not None],
        ),
        run.lost_output,
        "![loss and gradient norm over the steps](loss.png)",
        "![load of each expert, and the balance over the steps](experts.png)"
        if routing
        else None,
        _table("Predictions", PREDICTION_HEADINGS, prediction_rows(run.prediction)),
        _table(
            "Recompilations", ("step", "phase", "function", "reason"), recompilations
        ),
        _table("Resumes", RESUME_HEADINGS, resume_rows),
        _section(
            "Sample of the trained model",
            None if run.sample is None else fence(run.sample),
        ),
        _section(
            "Profile", None if run.profile is None else profile_markdown(run.profile)
        ),
        _table("Layout", ("part", "value"), layout),
        _table("Files", ("file", "content"), files),
        _section(
            "How the numbers are measured",
            "\n".join(f"- {line}" for line in run.definitions),
        ),
        _table("Configuration", ("part", "value"), configuration),
        DEFAULTS_LEFT_OUT,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _section(heading: str, body: str | None) -> str | None:
    return None if body is None else f"## {heading}\n\n{body}"


def _table(
    heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str | None:
    return _section(heading, markdown_table([head, *rows]) if rows else None)


def ending_line(run: RunResult) -> str:
    """Number of steps, and why the run ended."""
    return f"{run.steps.steps} of {run.planned_steps}; {value_text(run.stop_reason)}"


def profile_markdown(profile: ProfileResult) -> str:
    """Files and slowest operators of rank 0."""
    if profile.rank not in profile.ranks:
        others = ", ".join(map(str, profile.ranks))
        return (
            f"`profile/` has the profiles of ranks {others}; rank {profile.rank} "
            "was not profiled."
        )
    parts = []
    if profile.trace_file:
        parts.append(
            f"Rank {profile.rank}, {profile.traced_steps}; trace: `profile/{profile.trace_file}`."
        )
    if profile.operators:
        head, *rows = operator_rows(profile.operators)
        rows = [[f"`{name}`", *cells] for name, *cells in rows]
        parts.append(markdown_table([head, *rows], range(1, len(head))))
    if profile.snapshot_files:
        pages = ", ".join(
            f"[profile/{name}](profile/{name})" for name in profile.snapshot_files
        )
        parts.append(f"Memory of rank {profile.rank}: {pages}.")
    return "\n\n".join(parts)


def operator_rows(operators: Sequence[Operator]) -> list[list[str]]:
    """Heading and rows of the columns with values; times are sums over the steps."""
    columns: list[tuple[str, Callable[[Operator], str | None]]] = [
        ("operator", lambda op: op.name),
        ("calls", lambda op: f"{op.calls:,}"),
        ("self device time", lambda op: _milliseconds(op.self_device_us)),
        ("self CPU time", lambda op: _milliseconds(op.self_cpu_us)),
        ("total CPU time", lambda op: _milliseconds(op.cpu_us)),
        (
            "self memory",
            lambda op: (
                None
                if op.self_memory_bytes is None
                else size_text(op.self_memory_bytes)
            ),
        ),
    ]
    columns = [
        column
        for column in columns
        if any(column[1](op) is not None for op in operators)
    ]
    return [
        [heading for heading, _ in columns],
        *([cell(op) or "" for _, cell in columns] for op in operators),
    ]


def _milliseconds(microseconds: float | None) -> str | None:
    return None if microseconds is None else f"{microseconds / 1e3:,.2f} ms"


def fence(text: str) -> str:
    """A code block with a fence longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _spread(
    spread: Spread | None, factor: float = 1, unit: str = "", digits: int = 2
) -> str:
    if spread is None:
        return "not measured: every step was a warm-up step"
    return spread.text(factor, digits, unit)


def _routing_rows(routing: RoutingMetrics) -> list[tuple[str, str]]:
    return [
        ("load-balancing loss, last step", _number(routing.aux_loss)),
        ("router z-loss, last step", _number(routing.z_loss)),
        ("router entropy, last step", _number(routing.entropy)),
        ("busiest expert, last step", f"{float(routing.max_load):.2f} times the mean"),
        ("idlest expert, last step", f"{float(routing.min_load):.2f} times the mean"),
    ]


def _number(value: float, unit: str = "") -> str:
    return f"{value:.4f}{unit}" if math.isfinite(value) else f"**{float(value)}**"


def _nats(value: float | None) -> str:
    return "no steps" if value is None else _number(value, " nats")


def _loss_scale(results: RunResults) -> str | None:
    last = results.loss_scale
    lowest = results.lowest_loss_scale
    return (
        None if last is None else f"{last:g} in the last step, {lowest:g} at the lowest"
    )


def _gib(value: float | None) -> str | None:
    return None if value is None else gib_text(value)


def _peak(results: RunResults) -> str | None:
    parts = ", ".join(
        f"{name} {gib_text(size)}" for name, size in results.memory_parts.items()
    )
    return (
        None
        if results.memory_peak_gib is None
        else f"{_gib(results.memory_peak_gib)}" + f" ({parts})" * bool(parts)
    )


def _flat_rows(
    tree: dict[str, Any], defaults: Mapping[str, Any] = {}
) -> list[tuple[str, str]]:
    """One row per top-level entry, with its flattened subtree in one cell."""
    rows = []
    for name, value in tree.items():
        if isinstance(value, dict):
            settings = [
                _code(f"{key}={_plain(item)}")
                for key, item in flatten(value)
                if f"{name}.{key}" not in defaults or defaults[f"{name}.{key}"] != item
            ]
        else:
            settings = [_code(_plain(value))]
        if settings:
            rows.append((name, " ".join(settings)))
    return rows


def _plain(value: Any) -> str:
    if (
        isinstance(value, str)
        and value.isprintable()
        and value.strip() == value
        and value
    ):
        return value
    return json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    """Inline code, with apostrophes in place of backticks; nothing for empty text."""
    return f"`{text.replace('`', chr(39))}`" if text else ""
