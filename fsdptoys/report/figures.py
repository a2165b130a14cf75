"""What a picture shows, said once: two renderers draw it, one to point into and zoom, one as a PNG.

A picture has two axes, series over them, lines and bands that mark places, and words for those who do not see it. Which
color, marker and dashes a series gets follows from its number, so that a run looks the same in every picture. Nothing
here knows HTML, plotly or matplotlib.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

COLORS = ("#2f7fc6", "#d9622b", "#2b9a74", "#c2569f", "#a6830f", "#7a6fd0", "#d1495b", "#4d8f2f", "#2a97ab", "#8a7462")
"""Each has a contrast of 3:1 at least against the page in light and in dark."""
GREY = "#7d8791"
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
HATCHES = ("", "/", ".", "x", "-", "\\", "+", "|")

MOST_POINTS = 1200
"""Of one line of a picture; see :func:`thin`."""


Numbers = Sequence[float] | np.ndarray


class Shape(Enum):
    """How a series is drawn."""

    line = "line"
    steps = "steps"
    """A line that goes across first, then up or down."""
    points = "points"
    bars = "bars"
    """Across; those of one category stand end to end."""
    area = "area"
    """Stacked on the areas before it."""


@dataclass(frozen=True)
class Axis:
    """One side of a picture."""

    title: str
    unit: str = ""
    log: bool = False
    whole: bool = False
    """Whether only whole numbers are ticked."""
    categories: tuple[str, ...] = ()
    """Names in place of numbers, from the top."""
    from_zero: bool = False

    @property
    def text(self) -> str:
        """Title with unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True)
class Series:
    """Numbers that belong together; what is not finite leaves a gap."""

    name: str
    shape: Shape
    x: Numbers
    y: Numbers | Sequence[str]
    """Categories under a picture of bars."""
    look: int | None
    """Number of its color, marker and dashes; None for grey."""
    hover: tuple[str, ...] = ()
    """Of each point: lines of text."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Ends of each point's spread along x."""
    faint: bool = False
    """Whether it stands behind another that says the same more clearly."""
    ink: bool = False
    """Whether it is drawn in the color of the text, as diamonds."""

    @property
    def color(self) -> str:
        """As ``#rrggbb``."""
        return GREY if self.look is None else COLORS[self.look % len(COLORS)]

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
        """Pattern of its bars and areas."""
        return HATCHES[(self.look or 0) % len(HATCHES)]

    @property
    def marked(self) -> bool:
        """Whether a line has its points marked: with many they would hide it."""
        return len(self.x) <= 30


@dataclass(frozen=True)
class Rule:
    """A straight line across the picture."""

    at: float
    text: str
    upright: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis that is shaded."""

    start: float
    end: float


@dataclass(frozen=True)
class Label:
    """Words beside a point."""

    x: float
    y: float
    text: str
    side: str
    """``right``, ``left``, ``above`` or ``below`` of it."""


@dataclass(frozen=True)
class Picture:
    """All of one picture."""

    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    """Sentences: what is shown, how it was made, what was left out."""
    alt: str
    """What one sees, for those who do not."""
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()
    bands: tuple[Band, ...] = ()
    bands_text: str = ""
    """What the bands are."""
    labels: tuple[Label, ...] = ()
    diagonal: bool = False
    """Whether a line shows where both axes are the same."""

    @property
    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Ends of both axes where both are numbers, with room about the outermost points; None where there is none."""
        if self.y.categories:
            return None
        ends = []
        across = [values for s in self.series for values in (s.x, s.low, s.high)]
        for axis, values in ((self.x, across), (self.y, [s.y for s in self.series])):
            numbers = [float(v) for each in values for v in each if math.isfinite(float(v)) and (v > 0 or not axis.log)]  # type: ignore[operator]
            if not numbers:
                return None
            ends.append(room_about(min(numbers), max(numbers), axis))
        if self.diagonal:
            both = (min(ends[0][0], ends[1][0]), max(ends[0][1], ends[1][1]))
            ends = [both, both]
        return ends[0], ends[1]


def room_about(low: float, high: float, axis: Axis, share: float = 0.08) -> tuple[float, float]:
    """Ends of an axis that leave some of it free beyond the outermost values."""
    if axis.log:
        factor = max((high / low) ** share, 1.15)
        return low / factor, high * factor
    if axis.from_zero:
        return 0.0, high * (1 + share) or 1.0
    room = (high - low) * share or abs(high) * share or 1.0
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def thin(x: np.ndarray, *ys: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Leave out points of a long line, but no extreme: of every so many the lowest and the highest stay.

    Args:
        x: rising.
        ys: with the same length; the first decides which points stay. What is not finite in it stays a gap.
        most: points, about.

    Returns:
        x, the ys, and of how many points two are shown; 1 where all are.
    """
    if len(x) <= most:
        return x, list(ys), 1
    width = -(-2 * len(x) // most)
    kept: list[int] = []
    for start in range(0, len(x), width):
        part = ys[0][start : start + width]
        finite = np.isfinite(part)
        chosen = {start + int(np.argmin(finite))} if not finite.all() else set()
        if finite.any():
            chosen |= {start + int(np.argmin(np.where(finite, part, np.inf)))}
            chosen |= {start + int(np.argmax(np.where(finite, part, -np.inf)))}
        kept += sorted(chosen)
    kept = sorted({0, *kept, len(x) - 1})
    return x[kept], [y[kept] for y in ys], width


def thinned_words(width: int) -> str:
    """What to say of lines that :func:`thin` has made shorter; nothing where it has not."""
    return f"Of every {width:,} points the lowest and the highest are drawn." if width > 1 else ""


Box = tuple[float, float, float, float]
"""Left, bottom, right and top."""


def place_labels(
    points: Sequence[tuple[float, float]],
    texts: Sequence[tuple[int, str]],
    obstacles: Sequence[Box] = (),
    letter: tuple[float, float] = (0.0085, 0.05),
) -> list[tuple[int, str, str]]:
    """Put words beside points so that none covers another, a point, or leaves the picture; some may find no room.

    Args:
        points: in shares of the picture's width and height.
        texts: index of a point and its words, the most important first.
        obstacles: what is not to be covered either.
        letter: width of a letter and height of a line, in the same shares.

    Returns:
        Index, words and side of those that found room.
    """
    taken = [(x - 0.008, y - 0.018, x + 0.008, y + 0.018) for x, y in points] + list(obstacles)
    placed = []
    for index, text in texts:
        x, y = points[index]
        width, height = letter[0] * len(text), letter[1]
        boxes = {
            "above": (x - width / 2, y + 0.022, x + width / 2, y + 0.022 + height),
            "below": (x - width / 2, y - 0.022 - height, x + width / 2, y - 0.022),
            "right": (x + 0.012, y - height / 2, x + 0.012 + width, y + height / 2),
            "left": (x - 0.012 - width, y - height / 2, x - 0.012, y + height / 2),
        }
        for side, box in boxes.items():
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= 1 and box[3] <= 1
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                placed.append((index, text, side))
                break
    return placed


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
