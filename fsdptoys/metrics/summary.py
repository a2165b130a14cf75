"""Rendering of ``summary.md``: settings and environment, results, and the definition of each number."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from fsdptoys.utils.text import size_text

from .compilation import compilation_line, recompilation_rows
from .prediction import prediction_rows
from .results import Operator, ProfileResult, RunResult, Spread
from .resume_log import Resume, flatten
from .step import RoutingMetrics


def render_summary(run: RunResult) -> str:
    """Render the results of a run as Markdown; a pure function."""
    results, resumes, compilation = run.steps, run.resumes, run.compilation
    last = results.mean_last_steps
    unskipped = " without skipped ones" if results.skipped_steps else ""
    rows = [
        ("steps", ending_line(run)),
        ("first loss", _nats(results.first_loss)),
        ("last loss", _nats(results.last_loss)),
        (
            f"mean loss of the last {last} steps{unskipped}",
            "every step was skipped" if results.skipped_steps and not last else _nats(results.mean_last_loss),
        ),
    ]
    if results.skipped_steps:
        rows.append(("skipped steps", str(results.skipped_steps)))
    if results.spikes:
        rows.append(("loss spikes", str(results.spikes)))
    if results.eval_loss is not None:
        rows.append((f"held-out loss after step {results.eval_step}", _nats(results.eval_loss)))
    rows += [(f"reference: {_line(label)}", _nats(nats)) for label, nats in run.references_nats.items()]
    rows += [
        ("step time", _render_spread(results.step_time_seconds, 1e3, "ms")),
        ("tokens/s, all ranks", _render_spread(results.tokens_per_second, 1, "", digits=0)),
        ("TFLOP/s per rank", _render_spread(results.tflops_per_second_per_rank, 1, "", digits=3)),
    ]
    if results.mfu is not None:
        rows.append(("MFU", _render_spread(results.mfu, 100, "%", digits=1)))
    if results.data_stall is not None:
        rows.append(("waiting for data", f"{results.data_stall:.2%} of the step time"))
    for name, gib in (
        ("peak device memory of rank 0", results.memory_peak_gib),
        ("largest resident set of rank 0 after a step", results.resident_set_gib),
        ("peak resident set of rank 0", results.resident_set_peak_gib),
    ):
        if gib is not None:
            rows.append((name, f"{gib:.3f} GiB"))
    if results.routing is not None:
        rows += _routing_rows(results.routing)
    if compilation is not None:
        rows.append(("compiler, rank 0" + " of the last start" * bool(resumes), _line(compilation_line(compilation))))
    rows.append((f"wall time{' of the last start' if resumes else ''}", f"{run.wall_seconds:.1f} s"))

    parts = [
        f"# {_line(run.title)}",
        "## Configuration",
        _table(("part", "value"), [*_flat_rows(run.environment), *_flat_rows(run.settings)]),
        "## Results",
        _table(("result", "value"), rows),
        *([run.lost_output] if run.lost_output else []),
        "![loss and gradient norm over the steps](loss.png)",
    ]
    if results.routing is not None:
        parts.append("![load of each expert, and the balance over the steps](experts.png)")
    if run.prediction:
        head = ("quantity", "predicted", "measured", "difference")
        parts += ["## Predictions", _table(head, prediction_rows(run.prediction))]
    if compilation is not None and compilation.recompilations:
        head = ("step", "phase", "function", "reason")
        parts += ["## Recompilations", _table(head, recompilation_rows(compilation))]
    if resumes:
        parts += ["## Resumes", _resumes_table(resumes)]
    if run.sample is not None:
        parts += ["## Sample of the trained model", fence(run.sample)]
    if run.profile is not None:
        parts += ["## Profile", profile_markdown(run.profile)]
    parts += [
        "## Files",
        _table(("file", "content"), [(f"`{name}`", content) for name, content in run.files.items()]),
        "## How the numbers are measured",
        "\n".join(f"- {line}" for line in run.definitions),
    ]
    return "\n\n".join(parts) + "\n"


def ending_line(run: RunResult) -> str:
    """Number of steps, and why the run ended."""
    return f"{run.steps.steps} of {run.planned_steps}; {_line(run.stop_reason)}"


def profile_markdown(profile: ProfileResult) -> str:
    """Files and slowest operators of rank 0."""
    if profile.rank not in profile.ranks:
        others = ", ".join(map(str, profile.ranks))
        return f"`profile/` has the profiles of ranks {others}; rank {profile.rank} was not profiled."
    parts = []
    if profile.trace_file:
        parts.append(f"Rank {profile.rank}, {profile.traced_steps}; trace: `profile/{profile.trace_file}`.")
    if profile.operators:
        head, *rows = operator_rows(profile.operators)
        rows = [[f"`{name}`", *cells] for name, *cells in rows]
        parts.append(_table(head, rows, ["---", *["---:"] * (len(head) - 1)]))
    if profile.snapshot_files:
        pages = ", ".join(f"[profile/{name}](profile/{name})" for name in profile.snapshot_files)
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
        ("self memory", lambda op: None if op.self_memory_bytes is None else size_text(op.self_memory_bytes)),
    ]
    columns = [column for column in columns if any(column[1](op) is not None for op in operators)]
    return [[heading for heading, _ in columns], *([cell(op) or "" for _, cell in columns] for op in operators)]


def _milliseconds(microseconds: float | None) -> str | None:
    return None if microseconds is None else f"{microseconds / 1e3:,.2f} ms"


def fence(text: str) -> str:
    """A fenced code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _render_spread(spread: Spread | None, factor: float, unit: str, digits: int = 2) -> str:
    if spread is None:
        return "not measured: every step was a warm-up step"
    p10, median, p90 = (f"{value * factor:,.{digits}f}" for value in (spread.p10, spread.median, spread.p90))
    return f"{median}{' ' * bool(unit)}{unit} (p10 {p10}, p90 {p90})"


def _routing_rows(routing: RoutingMetrics) -> list[tuple[str, str]]:
    return [
        ("load-balancing loss, last step", _number(routing.aux_loss)),
        ("router z-loss, last step", _number(routing.z_loss)),
        ("router entropy, last step", _number(routing.entropy)),
        ("busiest expert, last step", f"{float(routing.max_load):.2f} times the mean"),
        ("idlest expert, last step", f"{float(routing.min_load):.2f} times the mean"),
    ]


def _resumes_table(resumes: Sequence[Resume]) -> str:
    rows = []
    for resume in resumes:
        start = f"after step {resume.step}" if resume.step else "from the beginning"
        ranks = f"{_plain(resume.world_size_before)} → {_plain(resume.world_size)}"
        if resume.world_size_before in (None, resume.world_size):
            ranks = _plain(resume.world_size)
        changed = [f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in (resume.changed or {}).items()]
        rows.append(
            (
                resume.time,
                start,
                _code(resume.checkpoint) if resume.checkpoint else "",
                ranks,
                " ".join(map(_code, changed)) if resume.changed is not None else "unknown",
                _code(f"{resume.moved_to}/") if resume.moved_to else "",
            )
        )
    return _table(("time", "start", "checkpoint", "ranks", "changed settings", "earlier files moved to"), rows)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else f"**{float(value)}**"


def _nats(value: float | None) -> str:
    if value is None:
        return "no steps"
    return f"{value:.4f} nats" if math.isfinite(value) else f"**{float(value)}**"


def _flat_rows(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """One row per top-level entry, with its flattened subtree in one cell."""
    rows = []
    for name, value in tree.items():
        settings = flatten(value) if isinstance(value, dict) else [("", value)]
        rows.append((name, " ".join(_code(f"{key}={_plain(item)}" if key else _plain(item)) for key, item in settings)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and value.strip() == value and value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    """Inline code, with apostrophes in place of backticks."""
    return f"`{text.replace('`', chr(39))}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], rule: Sequence[str] | None = None) -> str:
    lines = [head, rule or ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", chr(92) + "|") for cell in line) + " |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())
