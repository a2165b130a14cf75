"""Stacked bars that break down step time and memory of several runs.

A run measures totals only; the parts come from its prediction. Runs without a prediction get one
gray bar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import Category, TimePrediction
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Axis, Picture, Series, Shape
from fsdptoys.utils.text import fitting_unit

LEAST_SHARE = 1e-6  # Share of the longest bar below which a part is dropped as rounding noise


@dataclass(frozen=True)
class PlottedRun:
    """A run with steps and its label in figures."""

    name: str
    run: RecordedRun
    settings: tuple[str, ...]  # ``key=value`` of the settings that differ among the runs
    done: bool = True  # Whether it finished; unfinished runs are drawn but not ranked


def draw_time_split(runs: Sequence[PlottedRun]) -> Picture | None:
    """Draw predicted compute and wait times of a step as bars, with the measured median."""
    spreads = [one.run.results.step_time_seconds for one in runs]
    return _split_picture(
        "time_split",
        "Breakdown of the step time",
        Axis("step time", "ms", from_zero=True),
        runs,
        [_time_parts(one.run.prediction.time) if one.run.prediction else None for one in runs],
        [(s.median * 1e3, s.p10 * 1e3, s.p90 * 1e3) if s else None for s in spreads],
        "measured median",
        (
            "Bars: predicted before the run, by activity of the device. Diamonds: the measured "
            "median, with the 10th and the 90th percentile; a run does not measure the parts."
        ),
        "Bars: the median of the steps after warm-up.",
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
    """Draw predicted memory by category at a step's peak as bars, with the measured peak."""
    predictions = [one.run.prediction.memory if one.run.prediction else None for one in runs]
    peaks = [one.run.results.memory_peak_gib for one in runs]
    if not any(predictions) and all(peak is None for peak in peaks):
        sets = [
            one.run.results.resident_set_peak_gib or one.run.results.resident_set_gib
            for one in runs
        ]
        unit, size = fitting_unit(GIB * max(filter(None, sets), default=0.0))
        return _split_picture(
            "memory_split",
            "Memory",
            Axis("resident set", unit, from_zero=True),
            runs,
            [None] * len(runs),
            [None if gib is None else (gib * GIB / size,) for gib in sets],
            "measured, not split",
            "",
            "The resident set of the process, including Python.",
        )
    highest = max(
        [sum(memory.categories.values()) for memory in predictions if memory]
        + [peak * GIB for peak in peaks if peak is not None]
    )
    unit, size = fitting_unit(highest)
    measured = (
        "The runs did not measure it; the table has the resident set, which includes Python."
        if all(peak is None for peak in peaks)
        else "Diamonds: the measured peak of allocated memory."
    )
    return _split_picture(
        "memory_split",
        "Breakdown of memory at a step's peak",
        Axis("memory in tensors on a rank", unit, from_zero=True),
        runs,
        [
            {kind.value: memory.categories.get(kind, 0) / size for kind in Category}
            if memory
            else None
            for memory in predictions
        ],
        [None if peak is None else (peak * GIB / size,) for peak in peaks],
        "measured peak",
        f"Bars: predicted before the run, by category. {measured}",
        "Bars: the measured peak of allocated memory.",
    )


def _split_picture(
    name: str,
    title: str,
    axis: Axis,
    runs: Sequence[PlottedRun],
    predicted: Sequence[dict[str, float] | None],
    measured: Sequence[Sequence[float] | None],
    measured_name: str,
    caption: str,
    measured_caption: str,
) -> Picture | None:
    """Draw predictions as stacked bars and measurements as marks, or as bars where a run has no
    prediction.

    ``predicted`` has the parts of each run, ``measured`` its value and the ends of a spread, None
    if unknown; ``measured_caption`` replaces ``caption`` if no run has a prediction.
    """
    split = {one.name: parts for one, parts in zip(runs, predicted, strict=True) if parts}
    highest = max((sum(parts.values()) for parts in split.values()), default=0.0)
    series = []
    for look, part in enumerate(next(iter(split.values()), ())):
        sizes = [parts[part] for parts in split.values()]
        if max(sizes) > LEAST_SHARE * highest:
            series.append(Series(part, Shape.bars, sizes, list(split), look))
    values = {one.name: value for one, value in zip(runs, measured, strict=True) if value}
    bare = {run: value[0] for run, value in values.items() if run not in split}
    if bare:
        series.append(
            Series("measured, not split", Shape.bars, list(bare.values()), list(bare), None)
        )
    marked = {run: value for run, value in values.items() if run in split}
    if marked:
        marks, *ends = zip(*marked.values(), strict=True)
        low, high = ends or ((), ())
        series.append(
            Series(measured_name, Shape.points, marks, list(marked), None, (), low, high, ink=True)
        )
    if not series:
        return None
    without = [one.name for one in runs if one.name not in split]
    why = (
        "a breakdown needs a prediction: plan.predict=true and a profile of the device "
        "(plan.hardware)"
    )
    rest = (
        f"{'Gray: measured totals' if bare else 'Omitted: those'} of {', '.join(without)}; {why}."
        if without
        else ""
    )
    return Picture(
        name,
        title,
        [caption, rest] if split else [f"Measured totals; {why}.", measured_caption],
        (
            f"Bars of the {axis.title} of {len(runs)} "
            f"runs{', split into predicted parts' if split else ''}."
        ),
        axis,
        Axis("", categories=tuple(one.name for one in runs)),
        tuple(series),
    )
