"""Figures that compare runs: speed against memory, breakdowns, loss curves, and predictions against
measurements."""

from collections.abc import Sequence

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.metrics.figures import (
    SMOOTH_FROM_STEPS,
    STEP,
    finite_values,
    is_wide,
    mean_loss_series,
    step_series,
)
from fsdptoys.plan.search.ranking import pareto_front
from fsdptoys.utils.figures import Axis, Picture, Series, Shape, label_points
from fsdptoys.utils.text import fitting_unit

from .breakdown_figures import PlottedRun, draw_memory_split, draw_time_split
from .run_figures import step_times

# Relative difference in tokens a step up to which step times are compared directly
SAME_WORK = 0.01

MEASURES = {
    "memory_reserved_gib": (
        "device memory reserved",
        "the maximum reserved by the device's allocator on rank 0",
    ),
    "memory_peak_gib": ("peak memory in tensors", "the peak of memory in tensors on rank 0"),
    "resident_set_peak_gib": (
        "peak resident set",
        "the peak resident set of rank 0's process, including Python",
    ),
    "resident_set_gib": (
        "largest resident set after a step",
        "the largest resident set of rank 0's process after a step",
    ),
}
"""Memory measure of :class:`~fsdptoys.metrics.results.RunResults` → title and description."""


def draw_comparison(runs: Sequence[PlottedRun]) -> list[Picture]:
    """Draw all figures of several runs."""
    found = [
        draw_tradeoff(runs),
        draw_time_split(runs),
        draw_memory_split(runs),
        _losses(runs),
        step_times([(one.name, one.run) for one in runs]),
        _predictions(runs, "step time", "predicted_time", "Step time", "step time"),
        _predictions(
            runs,
            "reserved device memory",
            "predicted_memory",
            "Reserved memory",
            "device memory reserved",
        ),
    ]
    return [picture for picture in found if picture is not None]


def measured_memory(runs: Sequence[PlottedRun]) -> tuple[str | None, list[float | None]]:
    """The measure that most runs have, device memory first, and its value in each run; None if no
    run has any."""
    values = {name: [getattr(one.run.results, name) for one in runs] for name in MEASURES}
    measure = min(MEASURES, key=lambda name: values[name].count(None))
    return (measure if any(value is not None for value in values[measure]) else None), values[
        measure
    ]


def draw_tradeoff(runs: Sequence[PlottedRun]) -> Picture | None:
    """Draw memory against time with the Pareto frontier; time per 1,000 tokens if tokens a step
    differ."""
    measure, memories = measured_memory(runs)
    timed = [one for one in runs if one.run.results.step_time_seconds is not None]
    if measure is None or not timed:
        return None
    memory_title, description = MEASURES[measure]
    tokens = [
        float(np.median([metrics.valid_tokens for metrics in one.run.steps])) for one in timed
    ]
    same_work = max(tokens) <= min(tokens) * (1 + SAME_WORK)
    axis = Axis("median step time", "ms") if same_work else Axis("time for 1,000 tokens", "ms")
    unit, unit_bytes = fitting_unit(GIB * max(filter(None, memories), default=0.0))
    size = GIB / unit_bytes
    points: list[Series] = []
    left_out = []
    for look, (one, memory) in enumerate(zip(runs, memories, strict=True)):
        steps, speed = one.run.results.step_time_seconds, one.run.results.tokens_per_second
        if memory is None or steps is None or speed is None or not (same_work or speed.p10 > 0):
            left_out.append(one.name)
            continue
        low, time, high = (
            (1e3 * value for value in (steps.p10, steps.median, steps.p90))
            if same_work
            else (1e6 / value for value in (speed.p90, speed.median, speed.p10))
        )
        hover = [
            one.name,
            f"{axis.title}: {time:,.4g} ms",
            f"{memory_title}: {memory * size:,.4g} {unit}",
            f"{speed.median:,.0f} tokens/s",
            *one.settings,
        ]
        points.append(
            Series(
                one.name,
                Shape.points,
                [time],
                [memory * size],
                look,
                ("\n".join(hover),),
                (low,),
                (high,),
            )
        )
    if not points:
        return None
    places = [(point.x[0], float(point.y[0])) for point in points]
    best = pareto_front(places)
    names = tuple(points[index].name for index in best)
    x, y = zip(*(places[index] for index in best), strict=True)
    frontier = Series("nothing is both faster and smaller", Shape.steps, x, y, None, names)
    picture = Picture(
        "memory_against_time",
        "Memory against time",
        [
            (
                "Lower and further left is better; bars show the 10th to the 90th percentile of "
                "the steps after warm-up."
            ),
            f"Memory: {description}.",
            ""
            if same_work
            else (
                "Steps of these runs have different numbers of tokens, so times are for 1,000 "
                "tokens."
            ),
            f"Omitted, since one of the two or the tokens are missing: {', '.join(left_out)}."
            if left_out
            else "",
        ],
        f"A point for each of {len(points)} runs; on the frontier lie {', '.join(names)}.",
        axis,
        Axis(memory_title, unit),
        (frontier, *points),
    )
    important = sorted(points, key=lambda point: point.name not in names)
    return label_points(
        picture, [(point.x[0], float(point.y[0]), point.name) for point in important]
    )


def _losses(runs: Sequence[PlottedRun]) -> Picture | None:
    series, windows = [], set()
    for look, one in enumerate(runs):
        line = step_series(one.name, one.run.steps, "loss", look)
        if not finite_values([line]).size:
            continue
        mean = mean_loss_series(one.name, one.run.steps, look)
        if mean is not None:
            line, window = mean
            windows.add(window)
        series.append(line)
    if not series:
        return None
    over = " or ".join(map(str, sorted(windows)))
    lasts = [
        (one.run.results.mean_last_loss, one.name)
        for one in runs
        if one.run.results.mean_last_loss is not None
    ]
    lasts = [pair for pair in lasts if np.isfinite(pair[0])]
    lowest = f"; the lowest at the end is {min(lasts)[1]}" if lasts else ""
    return Picture(
        "losses",
        "Loss",
        [
            (
                "Mean over the global batch's valid tokens, before the step's update. Curves of "
                "equal runs coincide; dashes show those below."
            ),
            f"Running means over {over} steps for runs of {SMOOTH_FROM_STEPS} or more."
            if windows
            else "",
            "Drag to zoom; double-click to show all.",
        ],
        f"Loss curves of {len(series)} runs against the optimizer step{lowest}.",
        STEP,
        Axis("loss", "nats per token"),
        tuple(series),
    )


def _predictions(
    runs: Sequence[PlottedRun], quantity: str, name: str, title: str, axis: str
) -> Picture | None:
    """Draw the predicted and measured values of a quantity."""
    found = [
        (look, one.name, error)
        for look, one in enumerate(runs)
        for error in one.run.prediction_errors()
        if error.quantity == quantity
    ]
    if not found:
        return None
    unit, size = found[0][2].unit, 1.0
    values = np.array([(error.measured, error.predicted) for _, _, error in found])
    if unit == "GiB":
        unit, unit_bytes = fitting_unit(GIB * values.max())
        size = GIB / unit_bytes
    values *= size
    log = is_wide(values.ravel()) and bool((values > 0).all())
    _, furthest, worst = max(found, key=lambda entry: abs(entry[2].difference))
    series = []
    for (look, run, error), (measured, predicted) in zip(found, values.tolist(), strict=True):
        shown = f"measured {measured:,.4g} {unit}\npredicted {predicted:,.4g} {unit}"
        hover = f"{run}\n{shown} ({error.difference:+.1%})"
        series.append(Series(run, Shape.points, [measured], [predicted], look, (hover,)))
    return Picture(
        name,
        f"{title}, predicted and measured",
        [
            (
                "On the line prediction and measurement are equal; below it the prediction was too "
                "low."
            ),
            "Both axes are logarithmic." if log else "",
        ],
        (
            f"A point for each of {len(found)} runs, predicted against measured; furthest off is "
            f"{furthest}, by {worst.difference:+.0%}."
        ),
        Axis(f"measured {axis}", unit, log=log),
        Axis(f"predicted {axis}", unit, log=log),
        tuple(series),
        diagonal=True,
    )
