"""``summary.md``: what was run, what came out, and how each number was made, on one page."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from .compilation import Compilations, again_rows, compilation_line
from .config import (
    COLLECTIVES_FILE,
    EXPERT_FILES,
    PREDICTION_FILE,
    PROFILE_FOLDER,
    RESUMES_FILE,
    RUN_FILES,
    WRITERS,
)
from .prediction import Comparison, forecast_rows
from .results import RunResults, Spread
from .resume_log import Resume, flatten
from .step import (
    RoutingMetrics,
)
from .summary_notes import definitions


def render_summary(
    *,
    title: str,
    results: RunResults,
    planned_steps: int,
    stop_reason: str,
    wall_seconds: float,
    references: dict[str, float],
    config_tree: dict[str, Any],
    environment: dict[str, Any],
    sample: str | None,
    profile: str | None = None,
    compilation: Compilations | None = None,
    resumes: Sequence[Resume] = (),
    forecast: Sequence[Comparison] = (),
    writers: Sequence[str] = (),
    lost_output: str | None = None,
) -> str:
    """The page as Markdown.

    Args:
        title: name of the run.
        results: what its steps add up to.
        planned_steps: how many steps it was to have.
        stop_reason: why it ended.
        wall_seconds: from the recorder's start to its end, which is the last start's time alone.
        references: label → nats a token.
        config_tree: every setting.
        environment: where and with what the run took place.
        sample: text that the trained model wrote, if it did.
        profile: what the profiler found, as Markdown, if it was on.
        compilation: what was compiled, where something was to be.
        resumes: how the run went on.
        forecast: what was predicted beside what was measured.
        writers: names of those that wrote into folders of theirs.
        lost_output: a sentence, if not all of the console's lines could be printed.
    """
    without = " that made an update" if results.skipped_steps else ""
    rows = [
        ("steps", f"{results.steps} of {planned_steps}; {_line(stop_reason)}"),
        ("first loss", _nats(results.first_loss)),
        ("last loss", _nats(results.last_loss)),
        (f"mean loss of the last {results.mean_last_steps} steps{without}", _mean(results)),
    ]
    if results.skipped_steps:
        rows.append(("steps without update", str(results.skipped_steps)))
    if results.spikes:
        rows.append(("loss spikes", str(results.spikes)))
    if results.eval_loss is not None:
        rows.append((f"held-out loss after step {results.eval_step}", _nats(results.eval_loss)))
    rows += [(f"reference: {_line(label)}", _nats(nats)) for label, nats in references.items()]
    rows += [
        ("step time", _render_spread(results.step_time_seconds, 1e3, "ms")),
        ("tokens/s, all ranks", _render_spread(results.tokens_per_second, 1, "", digits=0)),
        ("TFLOP/s a rank", _render_spread(results.tflops_per_second_per_rank, 1, "", digits=3)),
    ]
    if results.mfu is not None:
        rows.append(("MFU", _render_spread(results.mfu, 100, "%", digits=1)))
    if results.data_stall is not None:
        rows.append(("waiting for data", f"{results.data_stall:.2%} of the step time"))
    if results.memory_peak_gib is not None:
        rows.append(("peak device memory of rank 0", f"{results.memory_peak_gib:.3f} GiB"))
    if results.resident_set_gib is not None:
        rows.append(("largest resident set of rank 0 after a step", f"{results.resident_set_gib:.3f} GiB"))
    if results.resident_set_peak_gib is not None:
        rows.append(("peak resident set of rank 0", f"{results.resident_set_peak_gib:.3f} GiB"))
    if results.routing is not None:
        rows += _routing_rows(results.routing)
    if compilation is not None:
        rows.append(("compiler, rank 0" + " of the last start" * bool(resumes), _line(compilation_line(compilation))))
    rows.append((f"wall time{' of the last start' if resumes else ''}", f"{wall_seconds:.1f} s"))

    parts = [
        f"# {_line(title)}",
        "## What was run",
        _table(("part", "value"), [*_flat_rows(environment), *_flat_rows(config_tree)]),
        "## What came out",
        _table(("result", "value"), rows),
        *([lost_output] if lost_output else []),
        "![loss and gradient norm against the step](loss.png)",
    ]
    if results.routing is not None:
        parts.append("![load of each expert, and the balance against the step](experts.png)")
    if forecast:
        head = ("what", "predicted", "measured", "difference")
        parts += ["## What was predicted", _table(head, forecast_rows(forecast))]
    if compilation is not None and compilation.again:
        head = ("step", "in", "function", "compiled again because of")
        parts += ["## What was compiled again", _table(head, again_rows(compilation))]
    if resumes:
        parts += ["## How it went on", _resumes_table(resumes)]
    if sample is not None:
        parts += ["## A sample of the trained model", fence(sample)]
    if profile is not None:
        parts += ["## Where the time and the memory went", profile]
    parts += [
        "## Files",
        _table(
            ("file", "what it holds"),
            [
                (f"`{name}`", what)
                for name, what in RUN_FILES.items()
                if (results.routing is not None or name not in EXPERT_FILES)
                and (profile is not None or name != PROFILE_FOLDER)
                and (name != COLLECTIVES_FILE or config_tree.get("debug", {}).get("trace_collectives"))
                and (resumes or name != RESUMES_FILE)
                and (forecast or name != PREDICTION_FILE)
                and (name in writers or name not in WRITERS)
            ],
        ),
        "## How the numbers were made",
        definitions(
            results.warmup_steps,
            with_experts=results.routing is not None,
            with_skipped=results.skipped_steps > 0,
            with_spikes=results.spikes > 0,
            with_forecast=bool(forecast),
            with_compilation=compilation is not None,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def fence(text: str) -> str:
    """A fenced block that no line of its text can end: its fence is longer than any run of backticks within."""
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
        ("busiest expert, last step", f"{routing.max_load:.2f} times the mean"),
        ("idlest expert, last step", f"{routing.min_load:.2f} times the mean"),
    ]


def _resumes_table(resumes: Sequence[Resume]) -> str:
    rows = []
    for resume in resumes:
        begun = f"after step {resume.step}" if resume.step else "anew"
        ranks = f"{_plain(resume.world_size_before)} → {_plain(resume.world_size)}"
        if resume.world_size_before in (None, resume.world_size):
            ranks = _plain(resume.world_size)
        changed = [f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in (resume.changed or {}).items()]
        rows.append(
            (
                resume.time,
                begun,
                _code(resume.checkpoint) if resume.checkpoint else "",
                ranks,
                " ".join(map(_code, changed)) if resume.changed is not None else "not known",
                _code(f"{resume.moved_to}/") if resume.moved_to else "",
            )
        )
    return _table(("time", "gone on", "from", "ranks", "settings changed", "earlier files moved to"), rows)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else f"**{value}**"


def _mean(results: RunResults) -> str:
    return (
        "no step made an update"
        if results.skipped_steps and not results.mean_last_steps
        else _nats(results.mean_last_loss)
    )


def _nats(value: float | None) -> str:
    if value is None:
        return "no step was done"
    return f"{value:.4f} nats" if math.isfinite(value) else f"**{value}**"


def _flat_rows(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """One row for each entry of the tree; what is below it goes into one cell."""
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
    """Inline code; backticks would end it, and are shown as apostrophes."""
    return f"`{text.replace('`', chr(39))}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", chr(92) + "|") for cell in line) + " |" for line in lines)


def _line(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())
