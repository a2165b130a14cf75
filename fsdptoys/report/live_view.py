"""Terminal display of a running run, fitted to the terminal's width."""

import math
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdptoys.metrics.live_console import metrics_columns
from fsdptoys.metrics.prediction import prediction_rows
from fsdptoys.metrics.results import RunResults, prediction_errors
from fsdptoys.train.heartbeat import Heartbeat, format_ranks
from fsdptoys.utils.text import counted, duration_text, printable

from .live_reader import FollowedRun, State
from .result_file import main_numbers

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_LINES = 5
NARROWEST_CHART = 20
STYLES = {
    State.running: "green",
    State.starting: "yellow",
    State.ended: "bold",
    State.gone: "bold red",
}


def draw_run(
    run: FollowedRun, state: State, console: Console, heading: str = ""
) -> RenderableType:
    """Draw progress, metrics, loss curve, summary and ranks of a polled run; ``heading``
    precedes its name."""
    width = console.width
    settings = run.settings

    def line(text: str, style: str = "") -> Text:
        return Text(printable(text, console.file), style=style, no_wrap=False)

    ranks = counted(settings.world_size, "rank") if settings.world_size else ""
    about = ", ".join(filter(None, [ranks, settings.device]))
    parts: list[RenderableType] = [
        Text.assemble(
            line(f"{heading}{settings.title}", "bold"),
            line(f"  {about}  "),
            (state.value, STYLES[state]),
        ),
        line(str(run.path), "dim"),
    ]
    if run.steps:
        facts = Table.grid("", "", padding=(0, 2))
        facts.columns[0].style = "dim"
        facts.columns[0].no_wrap = True
        for name, text in fact_rows(run, run.results()):
            facts.add_row(name, line(text))
        parts += [_bar(run), Text(), metrics_columns(run.steps[-1]), Text()]
        parts += map(
            line, draw_chart([metrics.loss for metrics in run.steps], width, "loss")
        )
        parts += [Text(), facts]
    else:
        parts.append(line("no step was done yet"))
    signs = run.signs() if state is not State.ended else {}
    if signs:
        now = time.time()
        parts.append(Text(_positions(signs, now)))
        parts += (
            line(text, "bold red") for text in run.late_ranks(signs, now).values()
        )
    return Group(*parts)


def draw_chart(losses: Sequence[float], width: int, label: str) -> list[str]:
    """Draw a curve in lines of ``width`` block characters, with its highest and lowest value on the
    left.

    If there are more values than columns, each column shows the mean of its part; non-finite values
    leave gaps.
    """
    values = np.array(losses, dtype=float)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return [f"{label}: no finite value yet"]
    margin = (
        max(
            len(label), *(len(f"{value:.4g}") for value in (finite.max(), finite.min()))
        )
        + 1
    )
    columns = min(len(values), max(NARROWEST_CHART, width - margin - 1))
    parts = (part[np.isfinite(part)] for part in np.array_split(values, columns))
    means = np.array([part.mean() if part.size else math.nan for part in parts])
    low = np.nanmin(means)
    high = np.nanmax(means)
    eighths = CHART_LINES * 8
    shares = (
        (means - low) / (high - low)
        if high > low
        else np.where(np.isnan(means), means, 0.5)
    )
    # A gap has no height
    heights = np.nan_to_num(1 + np.rint(shares * (eighths - 1))).astype(int)
    names = {0: f"{high:.4g}", CHART_LINES // 2: label, CHART_LINES - 1: f"{low:.4g}"}
    lines = []
    for row in range(CHART_LINES):
        below = (CHART_LINES - 1 - row) * 8
        blocks = "".join(BLOCKS[height] for height in np.clip(heights - below, 0, 8))
        lines.append(f"{names.get(row, ''):>{margin - 1}} {blocks}".rstrip())
    return lines


def _bar(run: FollowedRun) -> RenderableType:
    step = run.steps[-1].step
    planned = run.settings.planned_steps
    spent = duration_text(sum(metrics.step_time_seconds for metrics in run.steps))
    left = run.seconds_left()
    times = f"{spent} in steps" + (
        f", about {duration_text(left)} left" if left else ""
    )
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
    rows = [(title, f"{value} {more}") for title, value, more in main_numbers(results)]
    if run.resumes:
        count = counted(len(run.resumes), "time")
        rows.append(("resumed", f"{count}, last after step {run.resumes[-1].step}"))
    if run.settings.prediction is not None:
        errors = prediction_errors(run.settings.prediction, results)
        for what, predicted, measured, difference in prediction_rows(errors):
            text = f"{what} {predicted}, measured {measured}: {difference.replace('*', '')}"
            rows.append(("predicted", text))
    return rows


def _positions(signs: dict[int, Heartbeat], now: float) -> str:
    """Ranks at each step and phase, the foremost first."""
    positions: dict[tuple[int, str], list[Heartbeat]] = {}
    for sign in signs.values():
        positions.setdefault((sign.step, sign.phase), []).append(sign)
    parts = [
        f"{format_ranks([sign.rank for sign in there])} in step {step} ({phase}) "
        f"{max(0.0, now - max(sign.time for sign in there)):.0f} s ago"
        for (step, phase), there in sorted(positions.items(), reverse=True)
    ]
    return ", ".join(parts)
