"""Stacked bars that break down step time and memory of several runs.

A run measures totals only; the parts come from its prediction. Runs without a prediction get one
gray bar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import Category, TimePrediction
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Axis, Picture, Series, Shape
from fsdptoys.utils.text import fitting_unit

# Share of the longest bar below which a part is dropped as rounding noise
LEAST_SHARE = 1e-6
NEEDS_PREDICTION = (
    "a breakdown needs a prediction: plan.predict=true and a profile of the "
    "device (plan.hardware)"
)


@dataclass(frozen=True)
class PlottedRun:
    """A run with steps and its label in figures."""

    name: str
    run: RecordedRun
    settings: tuple[str, ...]  # ``key=value`` of those that differ among the runs
    is_finished: bool = True  # Unfinished runs are drawn but not ranked


def draw_time_split(runs: Sequence[PlottedRun]) -> Picture | None:
    """Draw predicted compute and wait times of a step as bars, with the measured median."""
    spreads = {one.name: one.run.results.step_time_seconds for one in runs}
    return _split_picture(
        "time_split",
        Axis("step time", "ms", from_zero=True),
        runs,
        {
            one.name: _time_parts(one.run.prediction.time)
            for one in runs
            if one.run.prediction
        },
        {
            name: (1e3 * spread.median, 1e3 * spread.p10, 1e3 * spread.p90)
            for name, spread in spreads.items()
            if spread is not None
        },
        "the measured median of the steps after warm-up, with the 10th and the 90th percentile",
    )


def _time_parts(time: TimePrediction) -> dict[str, float]:
    """Milliseconds of each part of a step."""
    parts = {
        **{kind.value: time.kinds.get(kind.value, 0.0) for kind in KernelKind},
        "other computing": time.compute_seconds - sum(time.kinds.values()),
        "waiting for collectives": time.exposed_communication_seconds,
        "waiting for copies": time.exposed_transfer_seconds,
        "waiting for the host": time.host_seconds,
    }
    return {name: max(seconds, 0.0) * 1e3 for name, seconds in parts.items()}


def draw_memory_split(runs: Sequence[PlottedRun]) -> Picture | None:
    """Draw predicted memory by category at a step's peak as bars, with the measured peak.

    If no run has either, draw the resident sets.
    """
    predicted = {
        one.name: one.run.prediction.memory.categories
        for one in runs
        if one.run.prediction
    }
    peaks = {one.name: one.run.results.memory_peak_gib for one in runs}
    title = "memory in tensors on a rank"
    text = "the measured peak of allocated memory"
    if not predicted and not any(peaks.values()):
        title = "resident set"
        text = "the resident set of the process, including Python"
        peaks = {
            one.name: one.run.results.resident_set_peak_gib
            or one.run.results.resident_set_gib
            for one in runs
        }
    measured = {name: gib * GIB for name, gib in peaks.items() if gib is not None}
    totals = [sum(parts.values()) for parts in predicted.values()]
    unit, size = fitting_unit(max([*totals, *measured.values()], default=0.0))
    return _split_picture(
        "memory_split",
        Axis(title, unit, from_zero=True),
        runs,
        {
            name: {kind.value: parts.get(kind, 0) / size for kind in Category}
            for name, parts in predicted.items()
        },
        {name: (total / size,) for name, total in measured.items()},
        text,
    )


def _split_picture(
    name: str,
    axis: Axis,
    runs: Sequence[PlottedRun],
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Sequence[float]],
    text: str,
) -> Picture | None:
    """Draw predictions as stacked bars and measurements as marks, or as bars where a run has no
    prediction.

    Args:
        predicted: run → size of each part.
        measured: run → value, and the ends of its spread if it has one.
        text: what is measured.
    """
    highest = max((sum(parts.values()) for parts in predicted.values()), default=0.0)
    series = []
    for look, part in enumerate(next(iter(predicted.values()), ())):
        sizes = [parts[part] for parts in predicted.values()]
        if max(sizes) > LEAST_SHARE * highest:
            series.append(Series(part, Shape.bars, sizes, list(predicted), look))
    bare = {run: value[0] for run, value in measured.items() if run not in predicted}
    if bare:
        sizes = list(bare.values())
        series.append(
            Series("measured, not split", Shape.bars, sizes, list(bare), None)
        )
    marked = {run: value for run, value in measured.items() if run in predicted}
    if marked:
        values, *ends = zip(*marked.values(), strict=True)
        low, high = ends or ((), ())
        series.append(
            Series(
                "measured",
                Shape.points,
                values,
                list(marked),
                None,
                (),
                low,
                high,
                ink=True,
            )
        )
    if not series:
        return None
    title = f"Breakdown of the {axis.title}"
    sentences = [f"Bars: predicted before the run, by part. Diamonds: {text}."]
    if not predicted:
        title = f"{axis.title[0].upper()}{axis.title[1:]}"
        sentences = [f"Measured totals; {NEEDS_PREDICTION}.", f"Bars: {text}."]
    elif bare:
        sentences.append(
            f"Gray: measured totals of {', '.join(bare)}; {NEEDS_PREDICTION}."
        )
    return Picture(
        name,
        title,
        sentences,
        f"Bars of the {axis.title} of {len(runs)} runs, split into parts where these are known.",
        axis,
        Axis("", categories=tuple(one.name for one in runs)),
        tuple(series),
    )
