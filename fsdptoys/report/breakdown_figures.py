"""Stacked bars that break down step time and memory of several runs.

A run measures totals only; the parts come from its prediction. Runs without a prediction get one gray bar.
"""

import functools
from collections.abc import Callable, Sequence

from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import (
    Category,
    TimePrediction,
)
from fsdptoys.plan.simulator.events import (
    KernelKind,
)

from .figures import Axis, Picture, Series, Shape
from .plot_inputs import Shown

MIB = 2**20
LEAST_SHARE = 1e-6
"""Share of the longest bar below which a part is dropped as rounding noise."""


def draw_time_split(shown: Sequence[Shown]) -> Picture | None:
    """Draw predicted compute and wait times of a step as bars, with the measured median."""
    kinds = [kind.value for kind in KernelKind]
    parts: dict[str, Callable[[TimePrediction], float]] = {
        **{kind: functools.partial(_of_kind, kind) for kind in kinds},
        "other computing": lambda time: time.compute_seconds - sum(time.kinds.values()),
        "waiting for collectives": lambda time: time.exposed_communication_seconds,
        "waiting for copies": lambda time: time.exposed_transfer_seconds,
        "waiting for the host": lambda time: time.host_seconds,
    }
    split: dict[str, list[float]] = {name: [] for name in parts}
    foretold = [one for one in shown if one.run.prediction is not None]
    for one in foretold:
        for name, of in parts.items():
            split[name].append(max(of(one.run.prediction.time), 0.0) * 1e3)  # type: ignore[union-attr]
    measured = [one for one in shown if one.run.results.step_time_seconds is not None]
    spreads = [one.run.results.step_time_seconds for one in measured]
    return _split_picture(
        "time_split",
        "What a step's time consists of",
        "step time",
        "ms",
        shown,
        foretold,
        split,
        measured,
        [spread.median * 1e3 for spread in spreads if spread],
        "measured median",
        "Bars: as predicted before the run, by what the device does or waits for. Diamonds: the measured median, with "
        "the 10th and the 90th percentile; a run does not measure the parts.",
        "Bars: the median of the steps after the warm-up.",
        [(spread.p10 * 1e3, spread.p90 * 1e3) for spread in spreads if spread],
    )


def _of_kind(kind: str, time: TimePrediction) -> float:
    return time.kinds.get(kind, 0.0)


def draw_memory_split(shown: Sequence[Shown]) -> Picture | None:
    """Draw predicted memory by category at a step's peak as bars, with the measured peak."""
    foretold = [one for one in shown if one.run.prediction is not None]
    on_device = [one for one in shown if one.run.results.memory_peak_gib is not None]
    peaks = [sum(one.run.prediction.memory.categories.values()) for one in foretold]  # type: ignore[union-attr]
    highest = max([*peaks, *(one.run.results.memory_peak_gib * GIB for one in on_device)], default=0)  # type: ignore[operator]
    if not foretold and not on_device:
        measured = [one for one in shown if one.run.results.resident_set_gib is not None]
        values = [one.run.results.resident_set_peak_gib or one.run.results.resident_set_gib or 0.0 for one in measured]
        return _split_picture(
            "memory_split",
            "Memory",
            "resident set",
            "GiB",
            shown,
            [],
            {},
            measured,
            values,
            "measured, not split",
            "",
            "The whole process in RAM, Python included.",
        )
    unit, size = ("GiB", GIB) if highest >= GIB else ("MiB", MIB)
    split = {
        kind.value: [one.run.prediction.memory.categories.get(kind, 0) / size for one in foretold]  # type: ignore[union-attr]
        for kind in Category
    }
    words = (
        "Diamonds: the measured peak of what is allocated."
        if on_device
        else ("Nothing here measures tensors on a CPU: the resident set, which has Python in it, is in the table.")
    )
    return _split_picture(
        "memory_split",
        "What memory consists of at a step's peak",
        "memory in tensors on a rank",
        unit,
        shown,
        foretold,
        split,
        on_device,
        [one.run.results.memory_peak_gib * GIB / size for one in on_device],  # type: ignore[operator]
        "measured peak",
        f"Bars: as predicted before the run, by what it is for. {words}",
        "Bars: the measured peak of what is allocated.",
    )


def _split_picture(
    name: str,
    title: str,
    axis: str,
    unit: str,
    shown: Sequence[Shown],
    foretold: Sequence[Shown],
    split: dict[str, list[float]],
    measured: Sequence[Shown],
    values: Sequence[float],
    measured_name: str,
    caption: str,
    measured_caption: str,
    spreads: Sequence[tuple[float, float]] = (),
) -> Picture | None:
    """Draw predictions as stacked bars and measurements as marks, or as bars where a run has no prediction.

    ``measured_caption`` replaces ``caption`` if no run has a prediction.
    """
    names = tuple(one.name for one in shown)
    highest = max((sum(sizes) for sizes in zip(*split.values(), strict=True)), default=0.0)
    foretold_names = [one.name for one in foretold]
    series = [
        Series(part, Shape.bars, sizes, foretold_names, look)
        for look, (part, sizes) in enumerate(split.items())
        if max(sizes, default=0.0) > LEAST_SHARE * highest
    ]
    bare = [(one.name, value) for one, value in zip(measured, values, strict=True) if one not in foretold]
    if bare:
        series.append(
            Series("measured, not split", Shape.bars, [value for _, value in bare], [name for name, _ in bare], None)
        )
    marked = [index for index, one in enumerate(measured) if one in foretold]
    if marked:
        series.append(
            Series(
                measured_name,
                Shape.points,
                [values[i] for i in marked],
                [measured[i].name for i in marked],
                None,
                low=tuple(spreads[i][0] for i in marked) if spreads else (),
                high=tuple(spreads[i][1] for i in marked) if spreads else (),
                ink=True,
            )
        )
    if not series:
        return None
    without = [one.name for one in shown if one not in foretold]
    why = (
        "there is no split without a prediction, for which a run needs plan.predict=true and a profile of its device "
        "(plan.hardware)"
    )
    whose = f"{'Grey: measured totals' if bare else 'Not shown: those'} of {', '.join(without)}; {why}."
    told = [caption, whose if without else ""] if foretold else [f"Measured totals; {why}.", measured_caption]
    return Picture(
        name,
        title,
        " ".join(filter(None, told)),
        f"Bars of the {axis} of {len(names)} runs{' by what was predicted for each part' if foretold else ''}.",
        Axis(axis, unit, from_zero=True),
        Axis("", categories=names),
        tuple(series),
    )
