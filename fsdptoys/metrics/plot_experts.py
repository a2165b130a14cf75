"""``experts.png``: how the last step's tokens were spread over the experts, and the balance against the step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .plot import marker, save_figure, shorten
from .step import StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOAD_COLOR, ENTROPY_COLOR = "#b2182b", "#1f5fa8"

NUMBERED_LAYERS, NUMBERED_EXPERTS = 24, 16
"""Up to so many layers and experts, each cell has its number written into it."""


def draw_experts(path: Path, title: str, steps: Sequence[StepMetrics], counts: Sequence[Sequence[int]]) -> None:
    """Draw the routing of a run of a model with experts as a PNG.

    Args:
        path: where the picture goes.
        title: stands above it.
        steps: the run; what is not finite leaves a gap.
        counts: tokens sent to each expert in the last step, a row for each layer with experts.
    """
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
    save_figure(figure, path)


def _draw_map(axes: "Axes", loads_LE: np.ndarray) -> None:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    highest = max(2.0, float(loads_LE.max()))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=highest)  # white is the mean, whatever the busiest has
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
    # Balance is 1 on both scales: the floor of the one, the ceiling of the other.
    highest, lowest = max(axes.get_ylim()[1], 1.05), min(entropy_axes.get_ylim()[0], 0.95)
    axes.set_ylim(1 - 0.03 * (highest - 1), highest)
    entropy_axes.set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    axes.set_title("balance against the step", loc="left", fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
