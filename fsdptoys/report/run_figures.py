"""Figures of one run: its curves, and its memory by category."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import PROFILE_FOLDER
from fsdptoys.metrics.plots import SMOOTH_FROM_STEPS, running_mean
from fsdptoys.train.recorded_run import RecordedRun

from .figures import Axis, Band, Picture, Rule, Series, Shape, thin, thinned_words
from .memory_timeline import Lifetime, Timeline, read_timeline
from .result_file import read_references

MIB = 2**20
STEP = Axis("optimizer step", whole=True)
WIDE = 20
"""Ratio of the highest to the lowest value above which an axis is logarithmic."""
WARMUP_WORDS = "warm-up, left out of medians"


def draw_run(run: RecordedRun, timeline: Timeline | None) -> list[Picture]:
    """Draw all figures of a run.

    Args:
        run: run with at least one step.
        timeline: memory history of its profile, if any; see :func:`run_timeline`.
    """
    found = [
        _loss(run),
        _curve(run, "grad_norm", "Gradient norm", "gradient norm", "", lambda m: m.grad_norm, "before clipping", True),
        _curve(run, "learning_rate", "Learning rate", "learning rate", "", lambda m: m.learning_rate, "of the update"),
        step_times([("this run", run)]),
        _curve(
            run,
            "tokens_per_second",
            "Speed",
            "tokens/s of all ranks",
            "",
            lambda m: m.tokens_per_second,
            "valid tokens of all ranks over the step time",
        ),
        _memory(run),
        _routing(run),
        draw_timeline(timeline) if timeline is not None else None,
    ]
    return [picture for picture in found if picture is not None]


def run_timeline(run: RecordedRun) -> Timeline | None:
    """Memory history of the run; see :func:`~fsdptoys.report.memory_timeline.read_timeline`."""
    return read_timeline(run.path / PROFILE_FOLDER, run.device_type)


def _loss(run: RecordedRun) -> Picture:
    steps, losses = _numbers(run.steps, lambda m: m.loss)
    x, (y,), width = thin(steps, losses)
    smooth = len(steps) >= SMOOTH_FROM_STEPS
    series = [Series("loss of each step", Shape.line, x, y, 0, faint=smooth)]
    caption = ["Mean over the global batch's valid tokens, before the step's update.", thinned_words(width)]
    if smooth:
        window, mean = running_mean(losses)
        middle = steps[window // 2 : window // 2 + len(mean)]
        x, (y,), _ = thin(middle, mean)
        series.append(Series(f"running mean over {window} steps", Shape.line, x, y, 0))
    held_out = [(m.step, m.eval_loss) for m in run.steps if m.eval_loss is not None]
    if held_out:
        numbers, values = zip(*held_out, strict=True)
        series.append(Series("held-out loss, after the update", Shape.line, numbers, values, 1))
    references = read_references(run.path)
    rules = tuple(Rule(nats, f"{label}: {nats:.3f}") for label, nats in references.items())
    if rules:
        caption.append(
            "Dashed: entropies of simple models of the same data; a loss below one has learned more than it."
        )
    last = run.results.last_loss
    return Picture(
        "loss",
        "Loss",
        " ".join(filter(None, caption)),
        f"Loss against the optimizer step, from {_told(run.results.first_loss)} to {_told(last)} nats a token.",
        STEP,
        Axis("loss", "nats a token"),
        tuple(series),
        rules,
    )


def _curve(
    run: RecordedRun,
    name: str,
    title: str,
    axis: str,
    unit: str,
    of: Callable[[StepMetrics], float | None],
    caption: str,
    log: bool = False,
) -> Picture | None:
    steps, values = _numbers(run.steps, of)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    x, (y,), width = thin(steps, values)
    return Picture(
        name,
        title,
        " ".join(filter(None, [caption[0].upper() + caption[1:] + ".", thinned_words(width)])),
        f"{title} against the optimizer step, between {finite.min():.4g} and {finite.max():.4g}.",
        STEP,
        Axis(axis, unit, log=log and wide(finite)),
        (Series(axis, Shape.line, x, y, 0),),
    )


def step_times(runs: Sequence[tuple[str, RecordedRun]]) -> Picture | None:
    """Draw step times of one or several runs; a run's index is the look of its series."""
    series, widths, all_finite = [], [1], []
    for look, (name, run) in enumerate(runs):
        steps, seconds = _numbers(run.steps, lambda m: m.step_time_seconds)
        if not len(steps):
            continue
        x, (y,), width = thin(steps, seconds * 1e3)
        series.append(Series(name, Shape.line, x, y, look))
        widths.append(width)
        all_finite.append(y[np.isfinite(y)])
    values = np.concatenate(all_finite) if all_finite else np.zeros(0)
    if not values.size:
        return None
    bands = {
        (start + 0.5, start + run.results.warmup_steps + 0.5)
        for _, run in runs
        for start in run.results.starts
        if run.results.warmup_steps and run.steps
    }
    traced = [name for name, run in runs if is_profiled(run) and len(run.steps)]
    log = wide(values)
    caption = [
        "Wall time of each step on rank 0, evaluations not included.",
        "Shaded: the first steps of each start, which pay for allocation and compilation and are left out of medians."
        if bands
        else "",
        f"Steps under the profiler are slower and are in the medians: {', '.join(traced)}." if traced else "",
        "The axis is logarithmic." if log else "",
        thinned_words(max(widths)),
    ]
    return Picture(
        "step_time",
        "Step time",
        " ".join(filter(None, caption)),
        f"Step time of {len(series)} run{'s' * (len(series) != 1)} against the optimizer step, between "
        f"{values.min():.4g} and {values.max():.4g} milliseconds.",
        STEP,
        Axis("step time", "ms", log=log),
        tuple(series),
        bands=tuple(Band(start, end) for start, end in sorted(bands)),
        bands_text=WARMUP_WORDS,
    )


def _memory(run: RecordedRun) -> Picture | None:
    names: dict[str, Callable[[StepMetrics], float | None]] = {
        "reserved by the allocator": lambda m: m.memory_reserved_gib,
        "peak in tensors so far": lambda m: m.memory_peak_gib,
        "in tensors after the step": lambda m: m.memory_allocated_gib,
    }
    where = "device memory of rank 0"
    if all(m.memory_reserved_gib is None for m in run.steps):
        where = "host memory of rank 0"
        names = {
            "peak resident set so far": lambda m: m.resident_set_peak_gib,
            "resident set after the step": lambda m: m.resident_set_gib,
        }
    series, width = [], 1
    for look, (name, of) in enumerate(names.items()):
        steps, values = _numbers(run.steps, of)
        if np.isfinite(values).any():
            x, (y,), width = thin(steps, values)
            series.append(Series(name, Shape.line, x, y, look))
    if not series:
        return None
    on_host = "On a CPU there is no device memory: this is the whole process in RAM, Python included."
    return Picture(
        "memory",
        "Memory",
        " ".join(
            filter(None, [on_host if where.startswith("host") else "As the allocator tells.", thinned_words(width)])
        ),
        f"{where[0].upper() + where[1:]} against the optimizer step: {', '.join(s.name for s in series)}.",
        STEP,
        Axis(where, "GiB", from_zero=True),
        tuple(series),
    )


def _routing(run: RecordedRun) -> Picture | None:
    routed = [m for m in run.steps if m.routing is not None]
    if not routed:
        return None
    series, width = [], 1
    for look, (name, of) in enumerate(
        {
            "busiest expert": lambda m: m.routing.max_load,
            "idlest expert": lambda m: m.routing.min_load,
            "entropy of the shares (1: balanced)": lambda m: m.routing.entropy,
        }.items()
    ):
        steps, values = _numbers(routed, of)
        x, (y,), width = thin(steps, values)
        series.append(Series(name, Shape.line, x, y, look))
    caption = "Tokens of the busiest and of the idlest expert over the mean of their layers; 1 is balance."
    return Picture(
        "experts",
        "Balance of the experts",
        " ".join(filter(None, [caption, thinned_words(width)])),
        "Load of the busiest and the idlest expert, and the entropy of all shares, against the optimizer step.",
        STEP,
        Axis("over the mean of the layer", from_zero=True),
        tuple(series),
        (Rule(1.0, "balance"),),
    )


def draw_timeline(timeline: Timeline) -> Picture:
    """Draw memory by lifetime as stacked areas."""
    x, (total, *layers), width = thin(timeline.moments, timeline.total, *timeline.layers.values(), most=1600)
    unit, size = ("GiB", GIB) if total.max() >= GIB else ("MiB", MIB)
    looks = {kind: look for look, kind in enumerate(Lifetime)}
    series = tuple(
        Series(kind.value, Shape.area, x, layer / size, looks[kind])
        for kind, layer in zip(timeline.layers, layers, strict=True)
        if layer.max() > 0.002 * total.max()
    )
    caption = [
        f"{timeline.device[0].upper() + timeline.device[1:]}, from profile/{timeline.file}.",
        "What a block was for is told by the phases in which it was allocated and freed.",
        ""
        if timeline.knows_before
        else "What was live before the first traced step (parameters, optimizer states) is not in such a trace.",
        "Shaded: backward passes." if timeline.backwards else "",
        thinned_words(width).replace("points", "events"),
    ]
    return Picture(
        "memory_timeline",
        "Memory over the profiled steps, by what it was for",
        " ".join(filter(None, caption)),
        f"Stacked areas of memory over the profiled steps; the highest sum is {total.max() / size:.4g} {unit}.",
        Axis("time since the first allocation", timeline.unit) if timeline.unit else Axis("allocations and frees"),
        Axis(timeline.device, unit, from_zero=True),
        series,
        bands=tuple(Band(start, end) for start, end in timeline.backwards),
        bands_text="backward",
    )


def wide(values: np.ndarray) -> bool:
    """Whether positive values span a ratio above ``WIDE``, which calls for a logarithmic axis."""
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() > WIDE)


def is_profiled(run: RecordedRun) -> bool:
    """Whether the profiler was enabled."""
    profile = run.tree.get("profile")
    return isinstance(profile, dict) and profile.get("enabled") is True


def _numbers(steps: Sequence[StepMetrics], of: Callable[[StepMetrics], float | None]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([m.step for m in steps]), np.array([math.nan if of(m) is None else of(m) for m in steps], float)


def _told(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4f}"
