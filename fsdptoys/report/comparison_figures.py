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
    "memory_peak_gib": (
        "peak memory in tensors",
        "the peak of memory in tensors on rank 0",
    ),
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
    pictures = [
        draw_tradeoff(runs),
        draw_time_split(runs),
        draw_memory_split(runs),
        _losses(runs),
        step_times([(one.name, one.run) for one in runs]),
        _predictions(runs, "predicted_time", "step time"),
        _predictions(runs, "predicted_memory", "reserved device memory"),
    ]
    return [picture for picture in pictures if picture is not None]


def measured_memory(
    runs: Sequence[PlottedRun],
) -> tuple[str | None, list[float | None]]:
    """The measure that most runs have, device memory first, and its value in each run; None if no
    run has any."""
    values = {
        name: [getattr(one.run.results, name) for one in runs] for name in MEASURES
    }
    measure = min(MEASURES, key=lambda name: values[name].count(None))
    is_measured = any(value is not None for value in values[measure])
    return (measure if is_measured else None), values[measure]


def draw_tradeoff(runs: Sequence[PlottedRun]) -> Picture | None:
    """Draw memory against time with the Pareto frontier; time per 1,000 tokens if tokens a step
    differ."""
    measure, memories = measured_memory(runs)
    if measure is None:
        return None
    memory_title, description = MEASURES[measure]
    tokens = [
        float(np.median([metrics.valid_tokens for metrics in one.run.steps]))
        for one in runs
    ]
    same_work = max(tokens) <= min(tokens) * (1 + SAME_WORK)
    axis = (
        Axis("median step time", "ms")
        if same_work
        else Axis("time for 1,000 tokens", "ms")
    )
    unit, unit_bytes = fitting_unit(GIB * max(filter(None, memories), default=0.0))
    points: list[Series] = []
    left_out = []
    for look, (one, gib) in enumerate(zip(runs, memories, strict=True)):
        steps = one.run.results.step_time_seconds
        speed = one.run.results.tokens_per_second
        if (
            gib is None
            or steps is None
            or speed is None
            or not (same_work or speed.p10 > 0)
        ):
            left_out.append(one.name)
            continue
        times = [1e3 * value for value in (steps.p10, steps.median, steps.p90)]
        if not same_work:
            times = [1e6 / value for value in (speed.p90, speed.median, speed.p10)]
        low, time, high = times
        memory = gib * GIB / unit_bytes
        hover = [
            one.name,
            f"{axis.title}: {time:,.4g} ms",
            f"{memory_title}: {memory:,.4g} {unit}",
            f"{speed.median:,.0f} tokens/s",
            *one.settings,
        ]
        spread = ("\n".join(hover),), (low,), (high,)
        points.append(Series(one.name, Shape.points, [time], [memory], look, *spread))
    if not points:
        return None
    places = [(point.x[0], float(point.y[0])) for point in points]
    best = pareto_front(places)
    names = tuple(points[index].name for index in best)
    x, y = zip(*(places[index] for index in best), strict=True)
    frontier = Series(
        "nothing is both faster and smaller", Shape.steps, x, y, None, names
    )
    sentences = [
        "Lower and further left is better; bars show the 10th to the 90th percentile of the steps "
        "after warm-up.",
        f"Memory: {description}.",
    ]
    if not same_work:
        sentences.append(
            "Steps of these runs have different numbers of tokens, so times are for 1,000 tokens."
        )
    if left_out:
        sentences.append(
            f"Omitted, since one of the two or the tokens are missing: {', '.join(left_out)}."
        )
    picture = Picture(
        "memory_against_time",
        "Memory against time",
        sentences,
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
    series = []
    windows = set()
    for look, one in enumerate(runs):
        line = step_series(one.name, one.run.steps, "loss", look)
        if not finite_values([line]).size:
            continue
        if mean := mean_loss_series(one.name, one.run.steps, look):
            line, window = mean
            windows.add(window)
        series.append(line)
    if not series:
        return None
    sentences = [
        "Mean over the global batch's valid tokens, before the step's update. Curves of equal runs "
        "coincide; dashes show those below.",
        "Drag to zoom; double-click to show all.",
    ]
    if windows:
        over = " or ".join(map(str, sorted(windows)))
        sentences.insert(
            1,
            f"Running means over {over} steps for runs of {SMOOTH_FROM_STEPS} or more.",
        )
    return Picture(
        "losses",
        "Loss",
        sentences,
        f"Loss curves of {len(series)} runs against the optimizer step.",
        STEP,
        Axis("loss", "nats per token"),
        tuple(series),
    )


def _predictions(
    runs: Sequence[PlottedRun], name: str, quantity: str
) -> Picture | None:
    """Draw the predicted and measured values of a quantity."""
    errors = [
        (look, one.name, error)
        for look, one in enumerate(runs)
        for error in one.run.prediction_errors()
        if error.quantity == quantity
    ]
    if not errors:
        return None
    unit = errors[0][2].unit
    values = np.array([(error.measured, error.predicted) for _, _, error in errors])
    if unit == "GiB":
        unit, unit_bytes = fitting_unit(GIB * values.max())
        values *= GIB / unit_bytes
    ends = [values.min(), values.max()]
    log = is_wide(values.ravel()) and bool((values > 0).all())
    _, furthest, worst = max(errors, key=lambda entry: abs(entry[2].difference))
    series = []
    for (look, run, error), (measured, predicted) in zip(
        errors, values.tolist(), strict=True
    ):
        values_text = (
            f"measured {measured:,.4g} {unit}\npredicted {predicted:,.4g} {unit}"
        )
        hover = f"{run}\n{values_text} ({error.difference:+.1%})"
        series.append(
            Series(run, Shape.points, [measured], [predicted], look, (hover,))
        )
    return Picture(
        name,
        f"{quantity[0].upper()}{quantity[1:]}, predicted and measured",
        [
            "On the line prediction and measurement are equal; below it the prediction was too low."
        ],
        f"A point for each of {len(errors)} runs, predicted against measured; furthest off is "
        f"{furthest}, by {worst.difference:+.0%}.",
        Axis(f"measured {quantity}", unit, log=log),
        Axis(f"predicted {quantity}", unit, log=log),
        (Series("predicted = measured", Shape.line, ends, ends, None), *series),
    )
