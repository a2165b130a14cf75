"""Description of a figure: axes, series, labels, captions and a text alternative.

:mod:`fsdptoys.utils.figure_png` draws it as a PNG, and the report's page interactively. Color,
marker and dashes of a series follow from its number, so a run looks the same in every figure.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

COLORS = (
    "#2f7fc6",
    "#d9622b",
    "#2b9a74",
    "#c2569f",
    "#a6830f",
    "#7a6fd0",
    "#d1495b",
    "#4d8f2f",
    "#2a97ab",
    "#8a7462",
)
"""Each has a contrast of at least 3:1 against the light and the dark page."""
GRAY = "#7d8791"
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
HATCHES = ("", "/", ".", "x", "-", "\\", "+", "|")

MOST_POINTS = 1200  # Points of one line; see :func:`thin`

SMALLEST = 1e-100
LARGEST = 1e100
"""Ends of the magnitudes that are drawn."""

Numbers = Sequence[float] | np.ndarray


class Shape(Enum):
    """How a series is drawn."""

    line = "line"
    steps = "steps"  # A staircase: horizontal first, then vertical
    points = "points"
    bars = "bars"  # Horizontal; bars of one category are stacked
    area = "area"  # Stacked on the previous areas
    cells = "cells"  # Colored cells of a map, in PNGs only


@dataclass(frozen=True)
class Axis:
    """One axis of a figure."""

    title: str
    unit: str = ""
    log: bool = False
    integer: bool = False  # Whether ticks are integers only
    categories: tuple[str, ...] = ()  # Names that replace numbers, from the top
    from_zero: bool = False

    @property
    def text(self) -> str:
        """Title with unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def drawable(values: Numbers) -> Numbers:
    """Numbers that can be drawn; others become NaN, since axes overflow near the ends of a float's
    range."""
    numbers = np.asarray(values, dtype=float)
    size = np.abs(numbers)
    bounded = np.where(
        ((size > SMALLEST) & (size < LARGEST)) | (size == 0), numbers, math.nan
    )
    return (
        values
        if np.array_equal(bounded, numbers, equal_nan=True)
        else tuple(bounded.tolist())
    )


@dataclass(frozen=True)
class Series:
    """Data of one line, area or set of points or bars; values that are not :func:`drawable` leave a
    gap."""

    name: str
    shape: Shape
    x: Numbers
    y: Numbers | Sequence[str]  # Numbers, or categories of a bar chart
    look: int | None  # Index of color, marker and dashes; None for gray
    hover: tuple[str, ...] = ()  # Text of each point, of one or more lines
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()  # Ends of each point's spread along x
    faint: bool = False
    """Whether it is background of a clearer series, as raw losses behind their running mean."""
    cells: np.ndarray | None = None  # [len(y), len(x)] of a map, relative to 1
    ink: bool = False  # Whether it is drawn as diamonds in the text color
    # Number of consecutive points of which two are drawn; see :func:`thin`
    window: int = 1

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high"):
            values = getattr(self, name)
            if len(values) and not isinstance(values[0], str):
                object.__setattr__(self, name, drawable(values))

    @property
    def color(self) -> str:
        """As ``#rrggbb``."""
        return GRAY if self.look is None else COLORS[self.look % len(COLORS)]

    @property
    def marker(self) -> str:
        """By plotly's name."""
        return "diamond" if self.ink else MARKERS[(self.look or 0) % len(MARKERS)]

    @property
    def dash(self) -> str:
        """By plotly's name."""
        return DASHES[(self.look or 0) % len(DASHES)]

    @property
    def hatch(self) -> str:
        """Pattern of bars and areas."""
        return HATCHES[(self.look or 0) % len(HATCHES)]

    @property
    def marked(self) -> bool:
        """Whether a line shows markers; many of them would hide it, and gray lines have none."""
        return len(self.x) <= 30 and self.look is not None


@dataclass(frozen=True)
class Label:
    """Text next to a point."""

    x: float
    y: float
    text: str
    side: str  # ``right``, ``left``, ``above`` or ``below`` the point


@dataclass(frozen=True)
class Picture:
    """One figure."""

    name: str  # File name without the suffix
    title: str
    # Caption: content, method and omissions; empty ones are skipped
    sentences: Sequence[str]
    alt: str  # Text alternative for screen readers
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    # Place on the y axis and text of each horizontal line
    rules: tuple[tuple[float, str], ...] = ()
    # Ends of each shaded interval of the x axis
    bands: tuple[tuple[float, float], ...] = ()
    bands_text: str = ""  # Legend of the bands
    labels: tuple[Label, ...] = ()

    def __post_init__(self) -> None:
        rules = tuple(
            rule for rule in self.rules if math.isfinite(drawable([rule[0]])[0])
        )
        labels = tuple(
            label
            for label in self.labels
            if np.isfinite(drawable([label.x, label.y])).all()
        )
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "labels", labels)

    @property
    def caption(self) -> str:
        """The sentences, and one about points that were left out."""
        window = max(series.window for series in self.series)
        thinned = (
            f"Of every {window:,} points the lowest and the highest are drawn."
            if window > 1
            else ""
        )
        return " ".join(filter(None, [*self.sentences, thinned]))

    @property
    def is_fixed(self) -> bool:
        """Whether the axes span exactly :attr:`ranges`; else the renderer chooses their limits."""
        shapes = {series.shape for series in self.series}
        return self.ranges is not None and shapes <= {Shape.points, Shape.steps}

    @property
    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Limits of both axes, padded; None for categories, or without finite values."""
        if self.y.categories:
            return None
        across = [values for s in self.series for values in (s.x, s.low, s.high)]
        ends = []
        for axis, columns in (
            (self.x, [*across, *self.bands]),
            (self.y, [s.y for s in self.series]),
        ):
            numbers = np.concatenate(
                [np.asarray(column, dtype=float) for column in columns]
            )
            numbers = numbers[np.isfinite(numbers) & ((numbers > 0) | (not axis.log))]
            if not numbers.size:
                return None
            ends.append(padded_range(float(numbers.min()), float(numbers.max()), axis))
        return ends[0], ends[1]


def padded_range(
    low: float, high: float, axis: Axis, share: float = 0.08
) -> tuple[float, float]:
    """Axis limits with padding beyond the extreme values."""
    if axis.log:
        factor = max((high / low) ** share, 1.15)
        return low / factor, high * factor
    if axis.from_zero:
        return 0.0, high * (1 + share) or 1.0
    room = (high - low) * share or abs(high) * share or 1.0
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def thin(
    x: np.ndarray, *ys: np.ndarray, most: int = MOST_POINTS
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Downsample a long line to about ``most`` points, keeping the minimum and maximum of each
    window.

    The first of the ys, each as long as x, selects the points; its non-finite values stay as gaps.

    Returns:
        x, the ys, and the window's width in points; 1 if nothing was removed.
    """
    if len(x) <= most:
        return x, list(ys), 1
    width = -(-2 * len(x) // most)
    indices: list[int] = []
    for start in range(0, len(x), width):
        part = ys[0][start : start + width]
        finite = np.isfinite(part)
        chosen = {start + int(np.argmin(finite))} if not finite.all() else set()
        if finite.any():
            chosen |= {start + int(np.argmin(np.where(finite, part, np.inf)))}
            chosen |= {start + int(np.argmax(np.where(finite, part, -np.inf)))}
        indices += sorted(chosen)
    indices = sorted({0, *indices, len(x) - 1})
    return x[indices], [y[indices] for y in ys], width


def thinned_line(name: str, x: np.ndarray, y: np.ndarray, look: int) -> Series:
    """Line of at most about ``MOST_POINTS`` points; see :func:`thin`."""
    x, (y,), window = thin(x, y)
    return Series(name, Shape.line, x, y, look, window=window)


Box = tuple[float, float, float, float]  # Left, bottom, right and top


def label_points(
    picture: Picture, texts: Sequence[tuple[float, float, str]]
) -> Picture:
    """Label points where there is room, without overlaps and inside the figure.

    Args:
        texts: x, y and label of the points, the most important first.
    """
    assert picture.ranges is not None
    (left, right), (bottom, top) = picture.ranges

    def scaled(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), (y - bottom) / (top - bottom)

    occupied: list[Box] = []
    for series in picture.series:
        corners = [scaled(x, float(y)) for x, y in zip(series.x, series.y, strict=True)]
        for low, high, (_, y) in zip(series.low, series.high, corners, strict=False):
            occupied.append(
                (scaled(low, 0)[0], y - 0.008, scaled(high, 0)[0], y + 0.008)
            )
        if series.shape is Shape.steps:
            for (x0, y0), (x1, y1) in itertools.pairwise(corners):
                occupied.append((x0, y0 - 0.008, x1, y0 + 0.008))
                occupied.append((x1 - 0.004, min(y0, y1), x1 + 0.004, max(y0, y1)))
    points = [scaled(x, y) for x, y, _ in texts]
    occupied += [(x - 0.008, y - 0.018, x + 0.008, y + 0.018) for x, y in points]
    labels = []
    for (x, y), label in zip(points, texts, strict=True):
        width = 0.0085 * len(label[2])
        height = 0.05
        sides = {
            "above": (x - width / 2, y + 0.022, x + width / 2, y + 0.022 + height),
            "below": (x - width / 2, y - 0.022 - height, x + width / 2, y - 0.022),
            "right": (x + 0.012, y - height / 2, x + 0.012 + width, y + height / 2),
            "left": (x - 0.012 - width, y - height / 2, x - 0.012, y + height / 2),
        }
        for side, box in sides.items():
            if (
                min(box) >= 0
                and max(box) <= 1
                and not any(_overlap(box, other) for other in occupied)
            ):
                occupied.append(box)
                labels.append(Label(*label, side))
                break
    return dataclasses.replace(picture, labels=tuple(labels))


def _overlap(one: Box, other: Box) -> bool:
    return (
        one[0] < other[2]
        and other[0] < one[2]
        and one[1] < other[3]
        and other[1] < one[3]
    )
