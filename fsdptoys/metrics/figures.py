"""Figures of a run's steps, and its plots ``loss.png`` and ``experts.png``."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import Axis, Picture, Series, Shape, thinned_line

from .step import StepMetrics

SMOOTH_FROM_STEPS = 50
"""Plots with at least this many steps show a running mean, too."""

STEP = Axis("optimizer step", integer=True)
WIDE = 20  # Ratio of the highest to the lowest value above which an axis is logarithmic
SKIPPED_LOOK = 6  # A red cross


def draw_loss(
    path: Path, title: str, steps: Sequence[StepMetrics], references: dict[str, float]
) -> None:
    """Draw loss, gradient norm, and float16's loss scale below one another."""
    pictures = [
        loss_picture(steps, references),
        norm_picture(steps),
        scale_picture(steps),
    ]
    heights = [4.4, 1.6, *([1.3] if pictures[2] is not None else [])]
    draw_png(path, *filter(None, pictures), title=title, heights=heights)


def draw_experts(
    path: Path,
    title: str,
    steps: Sequence[StepMetrics],
    counts: Sequence[Sequence[int]],
) -> None:
    """Draw the routing of a run.

    Args:
        counts: tokens of the last step, [MoE layers][experts].
    """
    tokens_LE = np.array(counts, dtype=float)
    loads_LE = tokens_LE / tokens_LE.mean(axis=1, keepdims=True)
    n_layers, n_experts = loads_LE.shape
    loads = Picture(
        "loads",
        f"tokens of each expert over its layer's mean, step {steps[-1].step}",
        [],
        "",
        Axis("expert", integer=True),
        Axis("layer with experts", integer=True),
        (
            Series(
                "", Shape.cells, range(n_experts), range(n_layers), None, cells=loads_LE
            ),
        ),
    )
    map_height = min(max(1.1, 0.3 * n_layers), 5.5)
    draw_png(
        path,
        loads,
        *expert_pictures(steps),
        title=title,
        heights=[map_height + 0.9, 1.7, 1.4],
    )


def loss_picture(
    steps: Sequence[StepMetrics], references: Mapping[str, float]
) -> Picture:
    """Describe losses, their running mean, held-out losses and references."""
    series = [step_series("loss of each step", steps, "loss", 0)]
    if (smooth := mean_loss_series("", steps, 0)) is not None:
        mean, window = smooth
        mean = replace(mean, name=f"running mean over {window} steps")
        series = [replace(series[0], faint=True), mean]
    evaluated = [metrics for metrics in steps if metrics.eval_loss is not None]
    if evaluated:
        series.append(
            step_series("held-out loss, after the update", evaluated, "eval_loss", 1)
        )
    rules = tuple((nats, f"{label}: {nats:.3f}") for label, nats in references.items())
    caption = (
        "Dashed: entropies of simple models of the same data; a loss below one has learned more "
        "than it."
    )
    span = (
        f", from {steps[0].loss:.4f} to {steps[-1].loss:.4f} nats per token"
        if steps
        else ""
    )
    return Picture(
        "loss",
        "Loss",
        [
            "Mean over the global batch's valid tokens, before the step's update.",
            caption if rules else "",
        ],
        f"Loss against the optimizer step{span}.",
        STEP,
        Axis("loss", "nats per token"),
        tuple(series),
        rules,
    )


def norm_picture(steps: Sequence[StepMetrics]) -> Picture | None:
    """Describe the gradient norm."""
    axis = "norm before clipping"
    return curve(
        steps, "grad_norm", "Gradient norm", "Before clipping.", axis, wide_is_log=True
    )


def scale_picture(steps: Sequence[StepMetrics]) -> Picture | None:
    """Describe float16's loss scale, with a cross at each skipped step."""
    sentence = "Of float16; overflows lower it."
    picture = curve(steps, "loss_scale", "Loss scale", sentence, wide_is_log=True)
    skipped = [
        metrics
        for metrics in steps
        if metrics.skipped and metrics.loss_scale is not None
    ]
    if picture is None or not skipped:
        return picture
    crosses = step_series("skipped steps", skipped, "loss_scale", SKIPPED_LOOK)
    return replace(
        picture, series=(*picture.series, replace(crosses, shape=Shape.points))
    )


def curve(
    steps: Sequence[StepMetrics],
    attribute: str,
    title: str,
    sentence: str,
    axis: str | None = None,
    wide_is_log: bool = False,
) -> Picture | None:
    """Describe one attribute of the steps; None without finite values."""
    axis = axis or title.lower()
    series = step_series(axis, steps, attribute, 0)
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


def expert_pictures(steps: Sequence[StepMetrics]) -> list[Picture]:
    """Describe the load of the experts and the entropy of their shares; empty without experts."""
    routed = [metrics for metrics in steps if metrics.routing is not None]
    if not routed:
        return []
    loads = {"busiest expert": "routing.max_load", "idlest expert": "routing.min_load"}
    load = Picture(
        "experts",
        "Load balance of the experts",
        [
            "Tokens of the busiest and the idlest expert over the mean of their layer; "
            "1 is balance."
        ],
        "Load of the busiest and the idlest expert against the optimizer step.",
        STEP,
        Axis("over the mean", from_zero=True),
        all_series(routed, loads),
        ((1.0, "balance"),),
    )
    sentence = "Of the experts' shares of the tokens; 1 is balance."
    entropy = curve(
        routed, "routing.entropy", "Entropy of the shares", sentence, "entropy"
    )
    return [load] + ([replace(entropy, name="entropy")] if entropy is not None else [])


def step_series(
    name: str,
    steps: Sequence[StepMetrics],
    attribute: str,
    look: int,
    factor: float = 1.0,
) -> Series:
    """Line of a (dotted) attribute of the steps; missing values leave gaps."""
    read = operator.attrgetter(attribute)
    # None becomes NaN
    values = np.array([read(metrics) for metrics in steps], dtype=float) * factor
    return thinned_line(
        name, np.array([metrics.step for metrics in steps]), values, look
    )


def all_series(
    steps: Sequence[StepMetrics], attributes: Mapping[str, str]
) -> tuple[Series, ...]:
    """Lines of several attributes, by name."""
    return tuple(
        step_series(name, steps, attribute, look)
        for look, (name, attribute) in enumerate(attributes.items())
    )


def mean_loss_series(
    name: str, steps: Sequence[StepMetrics], look: int
) -> tuple[Series, int] | None:
    """Running mean of the losses, and its window in steps; None for a run too short for one.

    The mean of a window without finite losses is a gap.
    """
    if len(steps) < SMOOTH_FROM_STEPS:
        return None
    losses = np.array([metrics.loss for metrics in steps], dtype=float)
    window = max(5, len(losses) // 40 | 1)  # odd, so that it has a middle
    finite = np.isfinite(losses)
    sums = np.convolve(np.where(finite, losses, 0.0), np.ones(window), mode="valid")
    counts = np.convolve(finite, np.ones(window), mode="valid")
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0.5)
    middle = np.array([metrics.step for metrics in steps[window // 2 :][: len(means)]])
    return thinned_line(name, middle, means, look), window


def finite_values(series: Sequence[Series]) -> np.ndarray:
    """All finite y values."""
    values = np.array([value for line in series for value in line.y], dtype=float)
    return values[np.isfinite(values)]


def is_wide(values: np.ndarray) -> bool:
    """Whether positive values span a ratio above ``WIDE``, which calls for a logarithmic axis."""
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() > WIDE)
