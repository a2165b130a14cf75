"""Plot of memory against speed: all predicted combinations and their Pareto front."""

from collections.abc import Sequence
from pathlib import Path

from fsdptoys.device import GIB
from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import Axis, Picture, Series, Shape, label_points

from .ranking import Candidate, frontier, label
from .search import SearchResult

MOST_LABELS = 9  # Labels of points of the frontier


def draw_frontier(path: Path, title: str, result: SearchResult) -> None:
    """Draw memory against speed of all predicted candidates as a PNG."""
    best = frontier(result.candidates)
    others = [*result.candidates, *result.over]
    limit = result.memory_bytes / GIB
    top = 1.1 * max(one.tokens_per_second for one in result.candidates)
    # Points far beyond the limit would squeeze the fitting ones into a corner.
    near = [(x, y) for x, y in map(_point, others) if x <= 1.35 * limit and y <= top]
    gib, speed = zip(*near, strict=True)
    best_gib, best_speed = zip(*map(_point, best), strict=True)
    everything = f"predicted combinations ({len(others):,})"
    # Between two points of the front one gets the lower speed.
    picture = Picture(
        "frontier",
        title,
        [],
        "",
        Axis("memory reserved on a rank", "GiB", from_zero=True),
        Axis("tokens/s of all ranks", from_zero=True),
        (
            Series(everything, Shape.points, gib, speed, None, faint=True),
            Series("Pareto front", Shape.steps, best_gib, best_speed, 0),
        ),
        bands=((limit, 1.25 * limit),),
        bands_text=f"beyond the memory limit of {limit:.4g} GiB",
    )
    points = spread_out(best, MOST_LABELS)
    labels = [(*_point(candidate), label(candidate.config)) for candidate in points]
    draw_png(path, label_points(picture, labels), heights=[5.6])


def _point(candidate: Candidate) -> tuple[float, float]:
    """GiB and tokens per second."""
    return candidate.reserved_bytes / GIB, candidate.tokens_per_second


def spread_out(best: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most ``most`` points of a frontier at equal distances, the smallest and the fastest among
    them."""
    count = min(most, len(best))
    steps = max(1, count - 1)
    return [best[round(index * (len(best) - 1) / steps)] for index in range(count)]
