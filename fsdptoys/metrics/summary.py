"""``summary.md``: what was run, what came out, and how each number was made, on one page."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdptoys.routing import RoutingMetrics

from .config import EXPERT_FILES, PROFILE_FOLDER, RUN_FILES
from .definitions import definitions
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
    """First steps left out of the spreads."""
    first_loss: float | None
    last_loss: float | None
    mean_last_loss: float | None
    """Mean over the last ``LAST_STEPS`` steps."""
    eval_loss: float | None
    """Of the last evaluation."""
    eval_step: int | None
    step_time_seconds: Spread | None
    tokens_per_second: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    memory_peak_gib: float | None
    """Highest of the device, on rank 0; None on a CPU."""
    resident_set_gib: float | None
    """Highest seen after a step, on rank 0."""
    routing: RoutingMetrics | None
    """Of the last step; None for a model without experts."""


def summarize(steps: Sequence[StepMetrics], warmup_steps: int) -> RunResults:
    """Reduce a run's steps to its results.

    Args:
        steps: all of them, in order.
        warmup_steps: how many first ones are left out of medians and percentiles.
    """
    measured = steps[warmup_steps:]
    evaluated = [metrics for metrics in steps if metrics.eval_loss is not None]
    last = [metrics.loss for metrics in steps[-LAST_STEPS:]]
    return RunResults(
        steps=len(steps),
        warmup_steps=warmup_steps,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        mean_last_loss=sum(last) / len(last) if last else None,
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_step=evaluated[-1].step if evaluated else None,
        step_time_seconds=_spread([metrics.step_time_seconds for metrics in measured]),
        tokens_per_second=_spread([metrics.tokens_per_second for metrics in measured]),
        tflops_per_second_per_rank=_spread([metrics.tflops_per_second_per_rank for metrics in measured]),
        mfu=_spread([metrics.mfu for metrics in measured if metrics.mfu is not None]),
        memory_peak_gib=_highest([metrics.memory_peak_gib for metrics in steps]),
        resident_set_gib=_highest([metrics.resident_set_gib for metrics in steps]),
        routing=steps[-1].routing if steps else None,
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
) -> str:
    """The page as Markdown.

    Args:
        title: name of the run.
        results: what its steps add up to.
        planned_steps: how many steps it was to have.
        stop_reason: why it ended.
        wall_seconds: from the recorder's start to its end.
        references: label → nats a token.
        config_tree: every setting.
        environment: where and with what the run took place.
        sample: text that the trained model wrote, if it did.
        profile: what the profiler found, as Markdown, if it was on.
    """
    rows = [
        ("steps", f"{results.steps} of {planned_steps}; {_line(stop_reason)}"),
        ("first loss", _nats(results.first_loss)),
        ("last loss", _nats(results.last_loss)),
        (f"mean loss of the last {min(LAST_STEPS, results.steps)} steps", _nats(results.mean_last_loss)),
    ]
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
    if results.memory_peak_gib is not None:
        rows.append(("peak device memory of rank 0", f"{results.memory_peak_gib:.3f} GiB"))
    if results.resident_set_gib is not None:
        rows.append(("largest resident set of rank 0", f"{results.resident_set_gib:.3f} GiB"))
    if results.routing is not None:
        rows += _routing_rows(results.routing)
    rows.append(("wall time", f"{wall_seconds:.1f} s"))

    parts = [
        f"# {_line(title)}",
        "## What was run",
        _table(("part", "value"), [*_flat_rows(environment), *_flat_rows(config_tree)]),
        "## What came out",
        _table(("result", "value"), rows),
        "![loss and gradient norm against the step](loss.png)",
    ]
    if results.routing is not None:
        parts.append("![load of each expert, and the balance against the step](experts.png)")
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
            ],
        ),
        "## How the numbers were made",
        definitions(results.warmup_steps, with_experts=results.routing is not None),
    ]
    return "\n\n".join(parts) + "\n"


def fence(text: str) -> str:
    """A fenced block that no line of its text can end: its fence is longer than any run of backticks within."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _spread(values: list[float]) -> Spread | None:
    return Spread(*(float(value) for value in np.percentile(values, [10, 50, 90]))) if values else None


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


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else f"**{value}**"


def _nats(value: float | None) -> str:
    if value is None:
        return "no step was done"
    return f"{value:.4f} nats" if math.isfinite(value) else f"**{value}**"


def _flat_rows(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """One row for each entry of the tree; what is below it goes into one cell."""
    rows = []
    for name, value in tree.items():
        settings = _flatten(value, "") if isinstance(value, dict) else [("", value)]
        rows.append((name, " ".join(_code(f"{key}={_plain(item)}" if key else _plain(item)) for key, item in settings)))
    return rows


def _flatten(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in tree.items():
        flat += _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return flat


def _plain(value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and value.strip() == value and value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    """Inline code; backticks would end it, and are shown as apostrophes."""
    return f"`{text.replace('`', chr(39))}`"


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(
        f"| {name.replace('|', chr(92) + '|')} | {value.replace('|', chr(92) + '|')} |" for name, value in lines
    )


def _line(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())
