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


def draw_run(run: RecordedRun) -> list[Picture]:
    """Draw the curves of a run with at least one step, the losses first."""
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
    sentences = ["Wall time of each step on rank 0, without evaluations."]
    if bands:
        sentences.append(
            "Shaded: the first steps of each start, which include allocation and compilation; "
            "medians exclude them."
        )
    if profiled := [name for name, run in runs if is_profiled(run) and run.steps]:
        sentences.append(
            f"Steps under the profiler are slower; medians include them: {', '.join(profiled)}."
        )
    return Picture(
        "step_time",
        "Step time",
        sentences,
        f"Step time of {counted(len(series), 'run')} against the optimizer step, between "
        f"{values.min():.4g} and {values.max():.4g} milliseconds.",
        STEP,
        Axis("step time", "ms", log=is_wide(values)),
        tuple(series),
        bands=tuple(sorted(bands)),
        bands_text="warm-up, excluded from medians",
    )


MEMORY = (
    (
        "memory_reserved_gib",
        "device memory of rank 0",
        "As counted by the allocator.",
        {
            "reserved by the allocator": "memory_reserved_gib",
            "peak in tensors so far": "memory_peak_gib",
            "in tensors after the step": "memory_allocated_gib",
        },
    ),
    (
        "memory_peak_gib",
        "memory in tensors of rank 0",
        "Counted in some steps; the others repeat the last count.",
        {
            "peak in tensors so far": "memory_peak_gib",
            "in tensors after the step": "memory_allocated_gib",
        },
    ),
    (
        "resident_set_gib",
        "resident set of rank 0",
        "Memory of the process in RAM, including Python.",
        {
            "peak resident set so far": "resident_set_peak_gib",
            "resident set after the step": "resident_set_gib",
        },
    ),
)
"""Attribute that a run must have, axis, caption and curves; the first that fits is drawn."""


def _memory(run: RecordedRun) -> Picture | None:
    for needed, axis, sentence, attributes in MEMORY:
        series = [
            s for s in all_series(run.steps, attributes) if finite_values([s]).size
        ]
        if all(getattr(metrics, needed) is None for metrics in run.steps) or not series:
            continue
        unit, size = fitting_unit(GIB * finite_values(series).max())
        return Picture(
            "memory",
            "Memory",
            [sentence],
            f"The {axis} against the optimizer step: {', '.join(s.name for s in series)}.",
            STEP,
            Axis(axis, unit, from_zero=True),
            tuple(replace(s, y=np.asarray(s.y) * (GIB / size)) for s in series),
        )
    return None


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
