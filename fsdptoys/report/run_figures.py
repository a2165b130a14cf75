"""Figures of one run: its curves, and its memory by category."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.metrics.figures import (
    STEP,
    all_series,
    curve,
    expert_pictures,
    finite_values,
    is_wide,
    loss_picture,
    norm_picture,
    scale_picture,
    step_series,
)
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.figures import Axis, Picture, Series, Shape, thin
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import counted, fitting_unit

from .memory_timeline import Lifetime, Timeline
from .result_file import references


def draw_run(run: RecordedRun, timeline: Timeline | None) -> list[Picture]:
    """Draw all figures of a run with at least one step."""
    steps = run.steps
    speed = "Valid tokens of all ranks over the step time."
    pictures = [
        loss_picture(steps, references(run.result, run.path)),
        norm_picture(steps),
        scale_picture(steps),
        curve(steps, "learning_rate", "Learning rate", "Of the update."),
        step_times([("this run", run)]),
        curve(steps, "tokens_per_second", "Speed", speed, "tokens/s of all ranks"),
        _memory(run),
        *expert_pictures(steps),
        draw_timeline(timeline) if timeline is not None else None,
    ]
    return [picture for picture in pictures if picture is not None]


def step_times(runs: Sequence[tuple[str, RecordedRun]]) -> Picture | None:
    """Draw step times of one or several runs; a run's index is the look of its series."""
    series = [
        step_series(name, run.steps, "step_time_seconds", look, 1e3)
        for look, (name, run) in enumerate(runs)
        if run.steps
    ]
    values = finite_values(series)
    if not values.size:
        return None
    bands = {
        (start + 0.5, start + run.results.warmup_steps + 0.5)
        for _, run in runs
        for start in run.results.starts
        if run.results.warmup_steps and run.steps
    }
    profiled = [name for name, run in runs if is_profiled(run) and run.steps]
    log = is_wide(values)
    return Picture(
        "step_time",
        "Step time",
        [
            "Wall time of each step on rank 0, without evaluations.",
            (
                "Shaded: the first steps of each start, which include allocation and compilation; "
                "medians exclude them."
            )
            if bands
            else "",
            f"Steps under the profiler are slower; medians include them: {', '.join(profiled)}."
            if profiled
            else "",
            "The axis is logarithmic." if log else "",
        ],
        f"Step time of {counted(len(series), 'run')} against the optimizer step, between "
        f"{values.min():.4g} and {values.max():.4g} milliseconds.",
        STEP,
        Axis("step time", "ms", log=log),
        tuple(series),
        bands=tuple(sorted(bands)),
        bands_text="warm-up, excluded from medians",
    )


def _memory(run: RecordedRun) -> Picture | None:
    where, sentence = "device memory of rank 0", "As counted by the allocator."
    attributes = {
        "reserved by the allocator": "memory_reserved_gib",
        "peak in tensors so far": "memory_peak_gib",
        "in tensors after the step": "memory_allocated_gib",
    }
    if all(metrics.memory_peak_gib is None for metrics in run.steps):
        where = "host memory of rank 0"
        sentence = (
            "Memory in tensors was not counted: this is the resident set of the process, "
            "including Python."
        )
        attributes = {
            "peak resident set so far": "resident_set_peak_gib",
            "resident set after the step": "resident_set_gib",
        }
    elif all(metrics.memory_reserved_gib is None for metrics in run.steps):
        where, sentence = (
            "memory in tensors of rank 0",
            "Counted in some steps; the others repeat the last count.",
        )
    series = [each for each in all_series(run.steps, attributes) if finite_values([each]).size]
    if not series:
        return None
    unit, size = fitting_unit(GIB * finite_values(series).max())
    series = [replace(each, y=np.asarray(each.y) * (GIB / size)) for each in series]
    return Picture(
        "memory",
        "Memory",
        [sentence],
        (
            f"{where[0].upper() + where[1:]} against the optimizer step: "
            f"{', '.join(s.name for s in series)}."
        ),
        STEP,
        Axis(where, unit, from_zero=True),
        tuple(series),
    )


def draw_timeline(timeline: Timeline) -> Picture:
    """Draw memory by lifetime as stacked areas."""
    x, (total, *layers), window = thin(
        timeline.moments, timeline.total, *timeline.layers.values(), most=1600
    )
    unit, size = fitting_unit(total.max())
    looks = {kind: look for look, kind in enumerate(Lifetime)}
    return Picture(
        "memory_timeline",
        "Memory over the profiled steps, by category",
        [
            f"{timeline.device[0].upper() + timeline.device[1:]}, from profile/{timeline.file}.",
            "A block's category follows from the phases in which it was allocated and freed.",
            ""
            if timeline.knows_before
            else (
                "Memory allocated before the first traced step (parameters, optimizer states) is "
                "not in such a trace."
            ),
            "Shaded: backward passes." if timeline.backwards else "",
        ],
        (
            "Stacked areas of memory over the profiled steps; the highest sum is "
            f"{total.max() / size:.4g} {unit}."
        ),
        Axis("time since the first allocation", timeline.unit)
        if timeline.unit
        else Axis("allocations and frees"),
        Axis(timeline.device, unit, from_zero=True),
        tuple(
            Series(kind.value, Shape.area, x, layer / size, looks[kind], window=window)
            for kind, layer in zip(timeline.layers, layers, strict=True)
            if layer.max() > 0.002 * total.max()
        ),
        bands=tuple(timeline.backwards),
        bands_text="backward",
    )


def is_profiled(run: RecordedRun) -> bool:
    """Whether the profiler was enabled."""
    return look_up(run.tree, "profile.enabled") is True
