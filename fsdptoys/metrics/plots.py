"""Plots of a run: ``loss.png`` and ``experts.png``.

``loss.png`` shows the loss with its references, the gradient norm, and float16's loss scale, over the steps.
``experts.png`` shows the load of each expert in the last step, and the balance over the steps.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdptoys.utils.atomic_write import write_atomically

from .step import StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH_FROM_STEPS = 50
"""Plots with at least this many steps show a running mean, too."""

LOSS_COLOR, EVAL_COLOR, GRAD_NORM_COLOR = "#1f5fa8", "#d1495b", "#5b6770"
REFERENCE_COLORS = ("#2a9d6f", "#b07d12", "#7b5ea7", "#3b8ea5")


def draw_loss(path: Path, title: str, steps: Sequence[StepMetrics], references: dict[str, float]) -> None:
    """Draw the curves of a run as a PNG, without a display and without pyplot's global state.

    Non-finite values leave a gap; ``references``, label → nats per token, are dashed lines.
    """
    from matplotlib.figure import Figure  # 0.7 s to import, needed once a run
    from matplotlib.ticker import LogLocator, NullFormatter

    scales = any(metrics.loss_scale is not None for metrics in steps)
    heights = [3.2, 1, 0.8] if scales else [3.2, 1]
    figure = Figure(figsize=(9, 7 if scales else 6), dpi=150, layout="constrained")
    loss_axes, norm_axes, *scale_axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    numbers = np.array([metrics.step for metrics in steps])
    loss_axes.set_title(shorten(title, 90), loc="left", fontsize=12, fontweight="bold", parse_math=False)
    _draw_losses(loss_axes, numbers, steps)
    for index, (label, nats) in enumerate(references.items()):
        color = REFERENCE_COLORS[index % len(REFERENCE_COLORS)]
        loss_axes.axhline(nats, color=color, linestyle=(0, (5, 3)), linewidth=1.3, label=f"{label}: {nats:.3f} nats")
    loss_axes.set_ylabel("loss (nats per token)")
    legend = figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)  # never over a curve
    for text in legend.get_texts():
        text.set_parse_math(False)

    norms = np.array([metrics.grad_norm for metrics in steps], dtype=float)
    norm_axes.plot(numbers, norms, color=GRAD_NORM_COLOR, linewidth=1.0, **marker(len(steps), 3))
    norm_axes.set_ylabel("gradient norm\n(before clipping)")
    finite = norms[np.isfinite(norms)]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 10:
        norm_axes.set_yscale("log")
        norm_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        norm_axes.yaxis.set_major_formatter("{x:g}")
        norm_axes.yaxis.set_minor_formatter(NullFormatter())
    norm_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in scale_axes:
        _draw_loss_scale(axes, numbers, steps)
    all_axes = [loss_axes, norm_axes, *scale_axes]
    all_axes[-1].set_xlabel("optimizer step")
    for axes in all_axes:
        axes.grid(color="#d9dde1", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)
        axes.spines[["top", "right"]].set_visible(False)
    _save_png(figure, path)


def _draw_losses(axes: "Axes", numbers: np.ndarray, steps: Sequence[StepMetrics]) -> None:
    losses = np.array([metrics.loss for metrics in steps], dtype=float)
    smooth = len(steps) >= SMOOTH_FROM_STEPS
    style: dict[str, Any] = {"alpha": 0.35, "linewidth": 1.0} if smooth else {"alpha": 1.0, "linewidth": 1.6}
    axes.plot(numbers, losses, color=LOSS_COLOR, label="loss of each step", **style, **marker(len(steps), 4))
    if smooth:
        window, mean = running_mean(losses)
        label = f"running mean over {window} steps"
        axes.plot(numbers[window // 2 : len(steps) - window // 2], mean, color=LOSS_COLOR, linewidth=1.8, label=label)
    evaluated = [(metrics.step, metrics.eval_loss) for metrics in steps if metrics.eval_loss is not None]
    if evaluated:
        points: dict[str, Any] = {"color": EVAL_COLOR, "marker": "o", "markersize": 4.5, "linewidth": 1.4}
        axes.plot(*zip(*evaluated, strict=True), label="held-out loss", **points)


def _draw_loss_scale(axes: "Axes", numbers: np.ndarray, steps: Sequence[StepMetrics]) -> None:
    """Draw the scale on a logarithmic axis, with a cross at each skipped step."""
    scales = np.array([metrics.loss_scale for metrics in steps], dtype=float)  # None becomes NaN
    skipped = np.array([metrics.skipped for metrics in steps])
    axes.step(numbers, scales, where="mid", color=GRAD_NORM_COLOR, linewidth=1.0)
    axes.plot(numbers[skipped], scales[skipped], "x", color=EVAL_COLOR, markersize=5)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale\n(x: skipped)" if skipped.any() else "loss scale")


def _save_png(figure: "Figure", path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def running_mean(values: np.ndarray) -> tuple[int, np.ndarray]:
    """The window's length, and the mean of the finite values in each full window (nan if there are none).

    The first mean belongs to the middle of the first window.
    """
    window = max(5, len(values) // 40 | 1)  # odd, so that it has a middle
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), np.ones(window), mode="valid")
    counts = np.convolve(finite, np.ones(window), mode="valid")
    return window, np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0.5)


def marker(count: int, size: float) -> dict[str, Any]:
    """Marker options up to 30 points, where a gap could hide the line between its neighbors."""
    return {"marker": "o", "markersize": size} if count <= 30 else {}


def shorten(text: str, width: int) -> str:
    """Text on one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


LOAD_COLOR, ENTROPY_COLOR = "#b2182b", "#1f5fa8"

NUMBERED_LAYERS, NUMBERED_EXPERTS = 24, 16
"""Up to these counts of layers and experts, each cell shows its number."""


def draw_experts(path: Path, title: str, steps: Sequence[StepMetrics], counts: Sequence[Sequence[int]]) -> None:
    """Draw the expert routing of a run; ``counts`` are the tokens of the last step, [MoE layers][experts]."""
    from matplotlib.figure import Figure  # 0.7 s to import, needed once a run

    tokens_LE = np.array(counts, dtype=float)
    loads_LE = tokens_LE / tokens_LE.mean(axis=1, keepdims=True)
    map_height = min(max(1.1, 0.3 * len(loads_LE)), 5.5)  # inches
    figure = Figure(figsize=(9, map_height + 4), dpi=150, layout="constrained")
    map_axes, balance_axes = figure.subplots(2, 1, height_ratios=[map_height, 2.2])
    figure.suptitle(shorten(title, 90), x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    _draw_map(map_axes, loads_LE)
    map_axes.set_title(f"tokens of each expert over its layer's mean, step {steps[-1].step}", loc="left", fontsize=10)
    _draw_balance(balance_axes, [metrics for metrics in steps if metrics.routing is not None])
    _save_png(figure, path)


def _draw_map(axes: "Axes", loads_LE: np.ndarray) -> None:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    highest = max(2.0, float(loads_LE.max()))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=highest)  # white is the mean, independent of the maximum
    image = axes.imshow(loads_LE, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    ticks = [0.0, 0.5, 1.0, (1 + highest) / 2, highest]
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.015, 0.0, 0.02, 1.0)), ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:.2g}x" if tick < 10 else f"{tick:.0f}x" for tick in ticks])
    axes.set_xlabel("expert")
    axes.set_ylabel("layer with experts")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    n_layers, n_experts = loads_LE.shape
    if n_layers <= NUMBERED_LAYERS and n_experts <= NUMBERED_EXPERTS:
        for (layer, expert), load in np.ndenumerate(loads_LE):
            dark = abs(norm(load) - 0.5) > 0.3
            axes.text(expert, layer, f"{load:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")


def _draw_balance(axes: "Axes", steps: Sequence[StepMetrics]) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [metrics.step for metrics in steps]
    entropy_axes = axes.twinx()
    for side, color, label, name in (
        (axes, LOAD_COLOR, "busiest expert\n(tokens over its layer's mean)", "max_load"),
        (entropy_axes, ENTROPY_COLOR, "entropy of the shares\n(1: balanced)", "entropy"),
    ):
        values = np.array([getattr(metrics.routing, name) for metrics in steps], dtype=float)
        side.plot(numbers, values, color=color, linewidth=1.4, **marker(len(steps), 3))
        side.set_ylabel(label, color=color)
        side.tick_params(axis="y", colors=color)
        side.spines["top"].set_visible(False)
        side.margins(x=0.015)
    # Balance is 1 on both axes: the minimum of the load, the maximum of the entropy.
    highest, lowest = max(axes.get_ylim()[1], 1.05), min(entropy_axes.get_ylim()[0], 0.95)
    axes.set_ylim(1 - 0.03 * (highest - 1), highest)
    entropy_axes.set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    axes.set_title("balance over the steps", loc="left", fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
