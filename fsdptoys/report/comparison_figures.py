"""Figures that compare runs: speed against memory, breakdowns, loss curves, and predictions against measurements."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.metrics.plots import SMOOTH_FROM_STEPS, running_mean
from fsdptoys.plan.search.ranking import unbeaten

from .breakdown_figures import draw_memory_split, draw_time_split
from .figures import Axis, Label, Picture, Series, Shape, place_labels, thin, thinned_words
from .plot_inputs import Shown, measure_of
from .run_figures import STEP, step_times, wide

MIB = 2**20
SAME_WORK = 0.01
"""Relative difference in tokens a step up to which step times are compared directly."""


@dataclass(frozen=True)
class _Point:
    look: int
    shown: Shown
    time: float
    low: float
    high: float
    memory_gib: float
    tokens_per_second: float


def draw_comparison(shown: Sequence[Shown]) -> list[Picture]:
    """Draw all figures of several runs."""
    found = [
        draw_tradeoff(shown),
        draw_time_split(shown),
        draw_memory_split(shown),
        _losses(shown),
        step_times([(one.name, one.run) for one in shown]),
        _foretold_time(shown),
        _foretold_memory(shown),
    ]
    return [picture for picture in found if picture is not None]


def draw_tradeoff(shown: Sequence[Shown]) -> Picture | None:
    """Draw memory against time with the Pareto frontier; time per 1,000 tokens if tokens a step differ."""
    measure = measure_of([one.run for one in shown])
    timed = [one for one in shown if one.run.results.step_time_seconds is not None]
    if measure is None or not timed:
        return None
    same_work = _same_work(timed)
    axis = Axis("median step time", "ms") if same_work else Axis("time for 1,000 tokens", "ms")
    points: list[_Point] = []
    left_out = []
    for look, one in enumerate(shown):
        results = one.run.results
        memory, steps, speed = measure.of(results), results.step_time_seconds, results.tokens_per_second
        if memory is None or steps is None or speed is None or not (same_work or speed.p10 > 0):
            left_out.append(one.name)
            continue
        ends = [1e3 * v for v in (steps.p10, steps.p90)] if same_work else [1e6 / v for v in (speed.p90, speed.p10)]
        time = 1e3 * steps.median if same_work else 1e6 / speed.median
        points.append(_Point(look, one, time, ends[0], ends[1], memory, speed.median))
    if not points:
        return None
    best = [points[index] for index in unbeaten([(point.time, point.memory_gib) for point in points])]
    unit, size = ("GiB", 1.0) if max(point.memory_gib for point in points) >= 1 else ("MiB", 1024.0)
    frontier = Series(
        "nothing is both faster and smaller",
        Shape.steps,
        [point.time for point in best],
        [point.memory_gib * size for point in best],
        None,
        tuple(point.shown.name for point in best),
    )
    series = []
    for point in points:
        told = [
            point.shown.name,
            f"{axis.title}: {point.time:,.4g} ms",
            f"{measure.title}: {point.memory_gib * size:,.4g} {unit}",
            f"{point.tokens_per_second:,.0f} tokens/s",
            *point.shown.settings,
        ]
        series.append(
            Series(
                point.shown.name,
                Shape.points,
                [point.time],
                [point.memory_gib * size],
                point.look,
                ("\n".join(told),),
                (point.low,),
                (point.high,),
            )
        )
    caption = [
        "Lower and further left is better; bars show the 10th to the 90th percentile of the steps after the warm-up.",
        measure.caption,
        "" if same_work else "Steps of these runs have different numbers of tokens, so the time is that of 1,000.",
        f"Not drawn, for want of one of the two, or of tokens: {', '.join(left_out)}." if left_out else "",
    ]
    picture = Picture(
        "memory_against_time",
        "Memory against time",
        " ".join(filter(None, caption)),
        f"A point for each of {len(points)} runs; on the frontier lie {', '.join(point.shown.name for point in best)}.",
        axis,
        Axis(measure.title, unit),
        (frontier, *series),
    )
    return _with_labels(picture, [point.look for point in points], {point.look for point in best})


def _with_labels(picture: Picture, looks: Sequence[int], important: set[int]) -> Picture:
    """Label points where there is room, those of the frontier first."""
    ranges = picture.ranges
    assert ranges is not None
    (left, right), (bottom, top) = ranges
    own = picture.series[1:]
    places = [((s.x[0] - left) / (right - left), (float(s.y[0]) - bottom) / (top - bottom)) for s in own]
    across = [((s.low[0] - left) / (right - left), (s.high[0] - left) / (right - left)) for s in own]
    spreads = [(low, y - 0.008, high, y + 0.008) for (low, high), (_, y) in zip(across, places, strict=True)]
    line = list(zip(picture.series[0].x, picture.series[0].y, strict=True))
    corners = [((float(x) - left) / (right - left), (float(y) - bottom) / (top - bottom)) for x, y in line]
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        spreads += [(x0, y0 - 0.008, x1, y0 + 0.008), (x1 - 0.004, y1, x1 + 0.004, y0)]
    order = sorted(range(len(own)), key=lambda index: looks[index] not in important)
    texts = [(index, own[index].name) for index in order]
    labels = tuple(
        Label(own[index].x[0], float(own[index].y[0]), text, side)
        for index, text, side in place_labels(places, texts, spreads)
    )
    return dataclasses.replace(picture, labels=labels)


def _same_work(shown: Sequence[Shown]) -> bool:
    tokens = [float(np.median([m.valid_tokens for m in one.run.steps])) for one in shown]
    return max(tokens) <= min(tokens) * (1 + SAME_WORK)


def _losses(shown: Sequence[Shown]) -> Picture | None:
    series, widths, windows = [], [1], set()
    for look, one in enumerate(shown):
        steps = np.array([m.step for m in one.run.steps])
        losses = np.array([m.loss for m in one.run.steps], dtype=float)
        if not np.isfinite(losses).any():
            continue
        if len(steps) >= SMOOTH_FROM_STEPS:
            window, losses = running_mean(losses)
            windows.add(window)
            steps = steps[window // 2 : window // 2 + len(losses)]
        x, (y,), width = thin(steps, losses)
        widths.append(width)
        series.append(Series(one.name, Shape.line, x, y, look))
    if not series:
        return None
    over = " or ".join(map(str, sorted(windows)))
    means = f"Running means over {over} steps where a run has {SMOOTH_FROM_STEPS} or more."
    lasts = [(one.run.results.mean_last_loss, one.name) for one in shown if one.run.results.mean_last_loss is not None]
    lasts = [pair for pair in lasts if math.isfinite(pair[0])]
    lowest = f"; the lowest at the end is {min(lasts)[1]}" if lasts else ""
    caption = [
        "Mean over the global batch's valid tokens, before the step's update. Runs that compute the same lie upon one "
        "another: dashes let the ones below show.",
        means if windows else "",
        "Drag to zoom; a double click shows all.",
        thinned_words(max(widths)),
    ]
    return Picture(
        "losses",
        "Loss",
        " ".join(filter(None, caption)),
        f"Loss curves of {len(series)} runs against the optimizer step{lowest}.",
        STEP,
        Axis("loss", "nats a token"),
        tuple(series),
    )


def _foretold_time(shown: Sequence[Shown]) -> Picture | None:
    pairs = []
    for look, one in enumerate(shown):
        spread, prediction = one.run.results.step_time_seconds, one.run.prediction
        if spread is not None and spread.median > 0 and prediction is not None:
            pairs.append((look, one, spread.median * 1e3, prediction.time.step_seconds * 1e3))
    return _foretold("predicted_time", "Step time, predicted and measured", "step time", "ms", pairs)


def _foretold_memory(shown: Sequence[Shown]) -> Picture | None:
    pairs = []
    for look, one in enumerate(shown):
        measured, prediction = one.run.results.memory_reserved_gib, one.run.prediction
        if measured and prediction is not None:
            pairs.append((look, one, measured, prediction.memory.reserved_bytes / GIB))
    return _foretold(
        "predicted_memory", "Reserved memory, predicted and measured", "device memory reserved", "GiB", pairs
    )


def _foretold(
    name: str, title: str, axis: str, unit: str, pairs: Sequence[tuple[int, Shown, float, float]]
) -> Picture | None:
    if not pairs:
        return None
    values = np.array([[measured, foretold] for _, _, measured, foretold in pairs])
    log = wide(values.ravel()) and bool((values > 0).all())
    worst = max(pairs, key=lambda pair: abs(pair[3] / pair[2] - 1))
    return Picture(
        name,
        title,
        "On the line both are the same; below it the prediction was too low." + " Both axes are logarithmic." * log,
        f"A point for each of {len(pairs)} runs, predicted against measured; furthest off is {worst[1].name}, by "
        f"{worst[3] / worst[2] - 1:+.0%}.",
        Axis(f"measured {axis}", unit, log=log),
        Axis(f"predicted {axis}", unit, log=log),
        tuple(
            Series(
                one.name,
                Shape.points,
                [measured],
                [foretold],
                look,
                (
                    f"{one.name}\nmeasured {measured:,.4g} {unit}\npredicted {foretold:,.4g} {unit} "
                    f"({foretold / measured - 1:+.1%})",
                ),
            )
            for look, one, measured, foretold in pairs
        ),
        diagonal=True,
    )
