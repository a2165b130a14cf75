"""Plot of memory against speed: all predicted combinations and their Pareto front."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdptoys.device import GIB
from fsdptoys.errors import ConfigError

from .ranking import Candidate, frontier, label
from .search import SearchResult

FRONTIER_COLOR, OTHER_COLOR, LIMIT_COLOR = "#1f5fa8", "#b3bac1", "#b2182b"
MOST_LABELS = 9  # Labels in the plot, on the points of the frontier furthest apart
LABEL_PLACES = (((7, -9), "left"), ((7, 5), "left"), ((-7, 5), "right"), ((-7, -12), "right"))
"""Offsets of a label from its point, in points, and the alignment; the first free one is used."""


def check_picture(path: Path) -> None:
    """Raise a ConfigError for a path that cannot be written, before anything is predicted."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png {path} must end in .png; write --png {path.name.partition('.')[0] or 'plan'}.png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"is in {path.parent}, which is not a folder"
        raise ConfigError(f"--png {path} {problem}; write --png plan.png")


def draw_frontier(path: Path, title: str, result: SearchResult) -> None:
    """Draw memory against speed of all predicted candidates as a PNG, without pyplot's global state."""
    from matplotlib.figure import Figure  # 0.7 s to import

    best, others = frontier(result.candidates), [*result.candidates, *result.over]
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(" ".join(title.split()), loc="left", fontsize=12, fontweight="bold", parse_math=False, wrap=True)
    gib, speed = zip(*map(_place, others), strict=True)
    dots: dict[str, Any] = {"s": 9, "linewidths": 0, "alpha": 0.7, "rasterized": True}
    axes.scatter(gib, speed, color=OTHER_COLOR, label=f"predicted combinations ({len(others):,})", **dots)
    gib, speed = zip(*map(_place, best), strict=True)
    # Between two points one gets the lower speed.
    line: dict[str, Any] = {"drawstyle": "steps-post", "marker": "o", "markersize": 4.5, "linewidth": 1.6}
    axes.plot(gib, speed, color=FRONTIER_COLOR, label="Pareto front", **line)
    limit = result.memory_bytes / GIB
    axes.axvline(limit, color=LIMIT_COLOR, linestyle=(0, (5, 3)), linewidth=1.3, label=f"memory limit: {limit:.4g} GiB")
    # Points far beyond the limit would squeeze the fitting ones into a corner.
    axes.set_xlim(0, 1.35 * limit)
    axes.set_ylim(0, 1.1 * max(one.tokens_per_second for one in result.candidates))
    axes.set_xlabel("memory reserved on a rank (GiB)")
    axes.set_ylabel("tokens/s of all ranks")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _label_points(axes, best)
    figure.savefig(path, format="png")


def _label_points(axes: Any, best: Sequence[Candidate]) -> None:
    """Label as many points as have room."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # lays the axes out
    chosen = spread_out(best, MOST_LABELS, (axes.get_xlim()[1], axes.get_ylim()[1]), least=0.0)
    points = [axes.transData.transform(_place(one)) for one in chosen]
    taken, inside = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points], axes.get_window_extent()
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
    style = {"textcoords": "offset points", "fontsize": 8, "color": FRONTIER_COLOR, "bbox": box, "parse_math": False}
    for one in chosen:
        for offset, side in LABEL_PLACES:
            text = axes.annotate(label(one.config), _place(one), xytext=offset, ha=side, **style)
            size = text.get_window_extent()
            fits = inside.contains(size.x0, size.y0) and inside.contains(size.x1, size.y1)
            if fits and not size.count_overlaps(taken):
                taken.append(size)
                break
            text.remove()


def _place(candidate: Candidate) -> tuple[float, float]:
    """GiB and tokens per second."""
    return candidate.reserved_bytes / GIB, candidate.tokens_per_second


def spread_out(best: Sequence[Candidate], most: int, span: tuple[float, float], least: float) -> list[Candidate]:
    """At most ``most`` points of a frontier: the fastest, the smallest, then the furthest from those chosen.

    ``span`` are the GiB and tokens per second that count as equally far; points nearer than ``least`` spans are left
    out.
    """
    places = [(gib / span[0], speed / span[1]) for gib, speed in map(_place, best)]
    chosen = list(dict.fromkeys([len(best) - 1, 0]))
    while len(chosen) < min(most, len(best)):
        # Labels are wide and low, so vertical distance counts more.
        distance = [min(abs(x - places[c][0]) / 4 + abs(y - places[c][1]) for c in chosen) for x, y in places]
        furthest = max(range(len(best)), key=distance.__getitem__)
        if distance[furthest] < least:
            break
        chosen.append(furthest)
    return [best[index] for index in sorted(chosen)]
