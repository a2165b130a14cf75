"""Terminal display of a running run, fitted to the terminal's width."""

import itertools
import math
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdptoys.metrics.live_console import metrics_columns
from fsdptoys.metrics.prediction import prediction_rows
from fsdptoys.metrics.results import RunResults, Spread, prediction_errors
from fsdptoys.train.heartbeat import Heartbeat, format_ranks
from fsdptoys.utils.text import counted, gib_text, printable

from .live_reader import FollowedRun, State

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_LINES = 5
NARROWEST_CHART = 20
STYLES = {
    State.running: "green",
    State.starting: "yellow",
    State.ended: "bold",
    State.gone: "bold red",
}


def draw_run(run: FollowedRun, state: State, console: Console, heading: str = "") -> RenderableType:
    """Draw progress, metrics, loss curve, summary and ranks of a polled run, whose name ``heading``
    precedes."""
    width, settings = console.width, run.settings

    def line(text: str, style: str = "") -> Text:
        return Text(printable(text, console.file), style=style, no_wrap=False)

    where = counted(settings.world_size, "rank") if settings.world_size else ""
    about = ", ".join(filter(None, [where, settings.device]))
    parts: list[RenderableType] = [
        Text.assemble(
            (printable(f"{heading}{settings.title}", console.file), "bold"),
            printable(f"  {about}  " if about else "  ", console.file),
            (state.value, STYLES[state]),
        ),
        line(str(run.path), "dim"),
    ]
    if run.steps:
        facts = Table.grid("", "", padding=(0, 2))
        facts.columns[0].style, facts.columns[0].no_wrap = "dim", True
        for name, text in fact_rows(run, run.results()):
            facts.add_row(name, line(text))
        parts += [_bar(run), Text(), metrics_columns(run.steps[-1]), Text()]
        parts += map(line, draw_chart([metrics.loss for metrics in run.steps], width, "loss"))
        parts += [Text(), facts]
    else:
        planned = f" of {settings.planned_steps} steps" if settings.planned_steps else " step"
        parts.append(
            line("no step was done" if state is State.ended else f"waiting for the first{planned}")
        )
    return Group(*parts, *_rank_lines(run, state, console))


def draw_chart(values: Sequence[float], width: int, label: str) -> list[str]:
    """Draw a curve in lines of ``width`` block characters, with its highest and lowest value on the
    left.

    If there are more values than columns, each column shows the mean of its part; non-finite values
    leave gaps.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return [f"{label}: no finite value yet"]
    margin = max(len(label), *(len(f"{value:.4g}") for value in (max(finite), min(finite)))) + 1
    columns = max(NARROWEST_CHART, width - margin - 1)
    means = _means(values, columns)
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    eighths = CHART_LINES * 8
    heights = [
        0
        if mean is None
        else 1 + round((mean - low) / (high - low) * (eighths - 1))
        if high > low
        else eighths // 2
        for mean in means
    ]
    names = {0: f"{high:.4g}", CHART_LINES // 2: label, CHART_LINES - 1: f"{low:.4g}"}
    lines = []
    for row in range(CHART_LINES):
        below = (CHART_LINES - 1 - row) * 8
        blocks = "".join(BLOCKS[min(8, max(0, height - below))] for height in heights)
        lines.append(f"{names.get(row, ''):>{margin - 1}} {blocks}".rstrip())
    return lines


def _means(values: Sequence[float], columns: int) -> list[float | None]:
    """Mean of the finite values in each of at most ``columns`` equal parts; None for a part without
    any."""
    count = min(columns, len(values))
    ends = [index * len(values) // count for index in range(count + 1)]
    parts = (
        [v for v in values[start:end] if math.isfinite(v)]
        for start, end in itertools.pairwise(ends)
    )
    return [sum(part) / len(part) if part else None for part in parts]


def _bar(run: FollowedRun) -> RenderableType:
    step, planned = run.steps[-1].step, run.settings.planned_steps
    spent = timedelta(seconds=round(sum(metrics.step_time_seconds for metrics in run.steps)))
    left = run.seconds_left()
    times = f"{spent} in steps" + (f", about {timedelta(seconds=round(left))} left" if left else "")
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        f"step {step}/{planned or '?'}",
        ProgressBar(total=planned or step, completed=step, width=None),
        times,
    )
    return bar


def fact_rows(run: FollowedRun, results: RunResults) -> list[tuple[str, str]]:
    """Summary of the steps so far, as rows of name and text."""
    rows = [
        ("step time", _spread(results.step_time_seconds, 1e3, 1, " ms")),
        ("tokens/s", _spread(results.tokens_per_second, 1, 0, "")),
    ]
    if results.data_stall is not None:
        rows.append(("data wait", f"{results.data_stall:.2%} of the step time, on rank 0"))
    if results.memory_peak_gib is not None:
        reserved = (
            f", {gib_text(results.memory_reserved_gib)} reserved"
            if results.memory_reserved_gib
            else ""
        )
        rows.append(
            (
                "memory",
                f"{gib_text(results.memory_peak_gib)} at the peak{reserved}, on rank 0's device",
            )
        )
    elif results.resident_set_gib is not None:
        peak = results.resident_set_peak_gib
        highest = f", {gib_text(peak)} at the peak" if peak is not None else ""
        rows.append(
            ("memory", f"{gib_text(results.resident_set_gib)} resident{highest}, on rank 0")
        )
    evaluated = [
        (metrics.eval_loss, metrics.step) for metrics in run.steps if metrics.eval_loss is not None
    ]
    if evaluated:
        latest, finite = evaluated[-1], [each for each in evaluated if math.isfinite(each[0])]
        lowest = f", lowest {min(finite)[0]:.4f} after {min(finite)[1]}" if finite else ""
        rows.append(("held-out loss", f"{latest[0]:.4f} after step {latest[1]}{lowest}"))
    if count := results.skipped_steps:
        rows.append(("skipped", counted(count, "step")))
    spikes = [metrics for metrics in run.steps if metrics.loss_spike is not None]
    if spikes:
        rows.append(("spikes", f"{len(spikes)} of the loss, the latest in step {spikes[-1].step}"))
    if count := len(run.resumes):
        rows.append(
            ("resumed", f"{counted(count, 'time')}, last after step {run.resumes[-1].step}")
        )
    if run.settings.prediction is not None:
        errors = prediction_errors(run.settings.prediction, results)
        for what, predicted, measured, difference in prediction_rows(errors):
            rows.append(
                (
                    "predicted",
                    f"{what} {predicted}, measured {measured}: {difference.replace('*', '')}",
                )
            )
    return rows


def _rank_lines(run: FollowedRun, state: State, console: Console) -> list[Text]:
    """Positions of the ranks, and sentences about late ones; empty after the end."""
    signs, now = run.signs(), time.time()
    if state is State.ended or not signs:
        return []
    late = run.late_ranks(signs, now).values()
    return [
        Text(_places(signs, now)),
        *(Text(printable(text, console.file), style="bold red") for text in late),
    ]


def _places(signs: dict[int, Heartbeat], now: float) -> str:
    places: dict[tuple[int, str], list[Heartbeat]] = {}
    for sign in signs.values():
        places.setdefault((sign.step, sign.phase), []).append(sign)
    parts = [
        f"{format_ranks([sign.rank for sign in there])} in step {step} ({phase}) "
        f"{max(0.0, now - max(sign.time for sign in there)):.0f} s ago"
        for (step, phase), there in sorted(places.items(), key=lambda place: place[0], reverse=True)
    ]
    return ", ".join(parts)


def _spread(spread: Spread | None, factor: float, digits: int, unit: str) -> str:
    if spread is None:
        return "only warm-up steps so far"
    return f"median {spread.text(factor, digits, unit)}"
