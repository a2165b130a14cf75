"""Figures of one run: its curves, and its memory by category."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.plots import SMOOTH_FROM_STEPS, running_mean
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import fitting_unit

from .figures import Axis, Picture, Series, Shape, thin, thinned_line
from .memory_timeline import Lifetime, Timeline
from .result_file import references

STEP = Axis("optimizer step", integer=True)
WIDE = 20  # Ratio of the highest to the lowest value above which an axis is logarithmic


def draw_run(run: RecordedRun, timeline: Timeline | None) -> list[Picture]:
    """Draw all figures of a run with at least one step."""
    found = [
        _loss(run),
        _curve(run, "grad_norm", "Gradient norm", "gradient norm", "Before clipping.", wide_is_log=True),
        _curve(run, "loss_scale", "Loss scale", "loss scale", "Of float16; overflows lower it.", wide_is_log=True),
        _curve(run, "learning_rate", "Learning rate", "learning rate", "Of the update."),
        step_times([("this run", run)]),
        _curve(
            run, "tokens_per_second", "Speed", "tokens/s of all ranks", "Valid tokens of all ranks over the step time."
        ),
        _memory(run),
        _routing(run),
        draw_timeline(timeline) if timeline is not None else None,
    ]
    return [picture for picture in found if picture is not None]


def step_series(name: str, steps: Sequence[StepMetrics], attribute: str, look: int, factor: float = 1.0) -> Series:
    """Line of a (dotted) attribute of the steps; missing values leave gaps."""
    read = operator.attrgetter(attribute)
    values = np.array([read(metrics) for metrics in steps], dtype=float) * factor  # None becomes NaN
    return thinned_line(name, np.array([metrics.step for metrics in steps]), values, look)


def mean_loss_series(name: str, steps: Sequence[StepMetrics], look: int) -> tuple[Series, int] | None:
    """Running mean of the losses, and its window in steps; None for a run too short for one."""
    if len(steps) < SMOOTH_FROM_STEPS:
        return None
    window, means = running_mean(np.array([metrics.loss for metrics in steps], dtype=float))
    middle = np.array([metrics.step for metrics in steps[window // 2 :][: len(means)]])
    return thinned_line(name, middle, means, look), window


def _loss(run: RecordedRun) -> Picture:
    series = [step_series("loss of each step", run.steps, "loss", 0)]
    if (smooth := mean_loss_series("", run.steps, 0)) is not None:
        mean, window = smooth
        series = [replace(series[0], faint=True), replace(mean, name=f"running mean over {window} steps")]
    held_out = [(m.step, m.eval_loss) for m in run.steps if m.eval_loss is not None]
    if held_out:
        numbers, values = zip(*held_out, strict=True)
        series.append(Series("held-out loss, after the update", Shape.line, numbers, values, 1))
    rules = tuple((nats, f"{label}: {nats:.3f}") for label, nats in references(run.result, run.path).items())
    caption = "Dashed: entropies of simple models of the same data; a loss below one has learned more than it."
    first, last = ("nothing" if v is None else f"{v:.4f}" for v in (run.results.first_loss, run.results.last_loss))
    return Picture(
        "loss",
        "Loss",
        ["Mean over the global batch's valid tokens, before the step's update.", caption if rules else ""],
        f"Loss against the optimizer step, from {first} to {last} nats per token.",
        STEP,
        Axis("loss", "nats per token"),
        tuple(series),
        rules,
    )


def _curve(
    run: RecordedRun, attribute: str, title: str, axis: str, sentence: str, wide_is_log: bool = False
) -> Picture | None:
    series = step_series(axis, run.steps, attribute, 0)
    finite = finite_values([series])
    if not finite.size:
        return None
    return Picture(
        attribute,
        title,
        [sentence],
        f"{title} against the optimizer step, between {finite.min():.4g} and {finite.max():.4g}.",
        STEP,
        Axis(axis, log=wide_is_log and is_wide(finite)),
        (series,),
    )


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
            "Shaded: the first steps of each start, which include allocation and compilation; medians exclude them."
            if bands
            else "",
            f"Steps under the profiler are slower; medians include them: {', '.join(profiled)}." if profiled else "",
            "The axis is logarithmic." if log else "",
        ],
        f"Step time of {len(series)} run{'s' * (len(series) != 1)} against the optimizer step, between "
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
        sentence = "Memory in tensors was not counted: this is the resident set of the process, including Python."
        attributes = {
            "peak resident set so far": "resident_set_peak_gib",
            "resident set after the step": "resident_set_gib",
        }
    elif all(metrics.memory_reserved_gib is None for metrics in run.steps):
        where, sentence = "memory in tensors of rank 0", "Counted in some steps; the others repeat the last count."
    series = [each for each in _all_series(run.steps, attributes) if finite_values([each]).size]
    if not series:
        return None
    unit, size = fitting_unit(GIB * finite_values(series).max())
    series = [replace(each, y=np.asarray(each.y) * (GIB / size)) for each in series]
    return Picture(
        "memory",
        "Memory",
        [sentence],
        f"{where[0].upper() + where[1:]} against the optimizer step: {', '.join(s.name for s in series)}.",
        STEP,
        Axis(where, unit, from_zero=True),
        tuple(series),
    )


def _routing(run: RecordedRun) -> Picture | None:
    routed = [metrics for metrics in run.steps if metrics.routing is not None]
    if not routed:
        return None
    attributes = {
        "busiest expert": "routing.max_load",
        "idlest expert": "routing.min_load",
        "entropy of the shares (1: balanced)": "routing.entropy",
    }
    return Picture(
        "experts",
        "Load balance of the experts",
        ["Tokens of the busiest and of the idlest expert relative to the mean of their layer; 1 is balance."],
        "Load of the busiest and the idlest expert, and the entropy of all shares, against the optimizer step.",
        STEP,
        Axis("relative to the layer mean", from_zero=True),
        tuple(_all_series(routed, attributes)),
        ((1.0, "balance"),),
    )


def _all_series(steps: Sequence[StepMetrics], attributes: Mapping[str, str]) -> list[Series]:
    return [step_series(name, steps, attribute, look) for look, (name, attribute) in enumerate(attributes.items())]


def draw_timeline(timeline: Timeline) -> Picture:
    """Draw memory by lifetime as stacked areas."""
    x, (total, *layers), window = thin(timeline.moments, timeline.total, *timeline.layers.values(), most=1600)
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
            else "Memory allocated before the first traced step (parameters, optimizer states) is not in such a trace.",
            "Shaded: backward passes." if timeline.backwards else "",
        ],
        f"Stacked areas of memory over the profiled steps; the highest sum is {total.max() / size:.4g} {unit}.",
        Axis("time since the first allocation", timeline.unit) if timeline.unit else Axis("allocations and frees"),
        Axis(timeline.device, unit, from_zero=True),
        tuple(
            Series(kind.value, Shape.area, x, layer / size, looks[kind], window=window)
            for kind, layer in zip(timeline.layers, layers, strict=True)
            if layer.max() > 0.002 * total.max()
        ),
        bands=tuple(timeline.backwards),
        bands_text="backward",
    )


def finite_values(series: Sequence[Series]) -> np.ndarray:
    """All finite y values."""
    values = np.array([value for each in series for value in each.y], dtype=float)
    return values[np.isfinite(values)]


def is_wide(values: np.ndarray) -> bool:
    """Whether positive values span a ratio above ``WIDE``, which calls for a logarithmic axis."""
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() > WIDE)


def is_profiled(run: RecordedRun) -> bool:
    """Whether the profiler was enabled."""
    profile = run.tree.get("profile")
    return isinstance(profile, dict) and profile.get("enabled") is True
