"""``summary.md``: what was run, what came out, and how each number was made, on one page."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdptoys.compilation import Compilations
from fsdptoys.routing import RoutingMetrics

from .compiled import again_rows, compilation_line
from .config import COLLECTIVES_FILE, EXPERT_FILES, PREDICTION_FILE, PROFILE_FOLDER, RESUMES_FILE, RUN_FILES, WRITERS
from .definitions import definitions
from .forecast import Comparison, forecast_rows
from .resumes import Resume, flatten
from .step import StepMetrics

LAST_STEPS = 10
"""How many last steps the mean of the last losses is over."""


@dataclass(frozen=True)
class Spread:
    """Tenth, fiftieth and ninetieth percentile over the steps after the warm-up."""

    p10: float
    median: float
    p90: float


@dataclass(frozen=True)
class RunResults:
    """What the steps of a run add up to; None where there was nothing to measure."""

    steps: int
    """Optimizer steps done."""
    warmup_steps: int
    """First steps of each start left out of the spreads."""
    starts: Sequence[int]
    """Steps after which the run was begun or gone on with."""
    first_loss: float | None
    last_loss: float | None
    mean_last_loss: float | None
    """Mean over the last steps that made an update."""
    mean_last_steps: int
    """How many these are, ``LAST_STEPS`` at most."""
    eval_loss: float | None
    """Of the last evaluation."""
    eval_step: int | None
    step_time_seconds: Spread | None
    tokens_per_second: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    memory_peak_gib: float | None
    """Highest of the device, on rank 0; None on a CPU."""
    memory_allocated_gib: float | None
    """After the last step, on rank 0; None on a CPU."""
    memory_reserved_gib: float | None
    """Highest that the allocator held after a step, on rank 0; None on a CPU."""
    resident_set_gib: float | None
    """Highest seen after a step, on rank 0."""
    resident_set_peak_gib: float | None
    """Highest at any moment, on rank 0; None of runs that did not record it."""
    routing: RoutingMetrics | None
    """Of the last step; None for a model without experts."""
    skipped_steps: int
    """Steps without update."""
    spikes: int
    """Steps whose loss stood out from those before."""
    data_stall: float | None
    """Share of the steps' time, after the warm-up, in which rank 0 waited for its batches; None where not recorded."""


def summarize(steps: Sequence[StepMetrics], warmup_steps: int, starts: Sequence[int] = (0,)) -> RunResults:
    """Reduce a run's steps to its results.

    Args:
        steps: all of them, in order.
        warmup_steps: how many first ones of each start are left out of medians and percentiles.
        starts: steps after which the run was begun or gone on with.
    """
    updated = [metrics for metrics in steps if not metrics.skipped]
    measured = [
        metrics for metrics in updated if not any(start < metrics.step <= start + warmup_steps for start in starts)
    ]
    evaluated = [metrics for metrics in steps if metrics.eval_loss is not None]
    last = [metrics.loss for metrics in updated[-LAST_STEPS:]]
    return RunResults(
        steps=steps[-1].step if steps else max(starts),
        warmup_steps=warmup_steps,
        starts=starts,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        mean_last_loss=sum(last) / len(last) if last else None,
        mean_last_steps=len(last),
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_step=evaluated[-1].step if evaluated else None,
        step_time_seconds=_spread([metrics.step_time_seconds for metrics in measured]),
        tokens_per_second=_spread([metrics.tokens_per_second for metrics in measured]),
        tflops_per_second_per_rank=_spread([metrics.tflops_per_second_per_rank for metrics in measured]),
        mfu=_spread([metrics.mfu for metrics in measured if metrics.mfu is not None]),
        memory_peak_gib=_highest([metrics.memory_peak_gib for metrics in steps]),
        memory_allocated_gib=steps[-1].memory_allocated_gib if steps else None,
        memory_reserved_gib=_highest([metrics.memory_reserved_gib for metrics in steps]),
        resident_set_gib=_highest([metrics.resident_set_gib for metrics in steps]),
        resident_set_peak_gib=_highest([metrics.resident_set_peak_gib for metrics in steps]),
        routing=steps[-1].routing if steps else None,
        skipped_steps=len(steps) - len(updated),
        spikes=sum(metrics.loss_spike is not None for metrics in steps),
        data_stall=_stall(measured),
    )


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


def _spread(values: list[float]) -> Spread | None:
    return Spread(*(float(value) for value in np.percentile(values, [10, 50, 90]))) if values else None


def _stall(steps: Sequence[StepMetrics]) -> float | None:
    waits = [(each.data_wait_seconds, each.step_time_seconds) for each in steps if each.data_wait_seconds is not None]
    return sum(wait for wait, _ in waits) / sum(seconds for _, seconds in waits) if waits else None


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


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
