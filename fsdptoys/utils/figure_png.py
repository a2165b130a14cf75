"""Draw described figures as PNG files with matplotlib, in light colors and with a legend."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomic_write import write_atomically
from .figures import MARKERS, Picture, Series, Shape
from .text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#20262c"
GRID = "#d9dde1"
SHADE = "#eef1f4"
RULE_COLORS = ("#2a9d6f", "#b07d12", "#7b5ea7", "#3b8ea5")
DASHED = (0, (5, 3))
PAPER = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
SYMBOLS = dict(zip(MARKERS, "osD^PvX", strict=True))
STYLES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (6, 3)),
    "dot": (0, (1.5, 2)),
    "dashdot": (0, (6, 2, 1.5, 2)),
}
OFFSETS = {
    "right": ((8, 0), "left", "center"),
    "left": ((-8, 0), "right", "center"),
    "above": ((0, 8), "center", "bottom"),
    "below": ((0, -8), "center", "top"),
}
LONGEST_NAME = 48
MOST_NUMBERS = (16, 24)  # Columns and rows up to which cells show their numbers
MOST_BARS = 250
"""Rows of one PNG: more are unreadable, and matplotlib cannot draw the height of 1,214 or more."""


def draw_png(
    path: Path, *pictures: Picture, title: str = "", heights: Sequence[float] = ()
) -> None:
    """Write the PNG of :func:`render_png`."""
    write_atomically(path, render_png(*pictures, title=title, heights=heights))


def render_png(
    *pictures: Picture, title: str = "", heights: Sequence[float] = ()
) -> bytes:
    """Draw figures below one another as a PNG, without a display or pyplot's global state.

    Args:
        title: heading of the PNG, above the titles of several figures.
        heights: inches of each figure; they follow from bars and legend by default.
    """
    from matplotlib.figure import Figure  # 0.7 s to import

    heights = heights[: len(pictures)] or [_height(picture) for picture in pictures]
    figure = Figure(figsize=(9, sum(heights)), dpi=150, layout="constrained")
    shares_x = len(pictures) > 1 and len({picture.x for picture in pictures}) == 1
    grid = figure.subplots(
        len(pictures), 1, sharex=shares_x, height_ratios=heights, squeeze=False
    )
    handles: list[Any] = []
    for axes, picture in zip(grid[:, 0], pictures, strict=True):
        _draw(axes, picture)
        size = {"fontsize": 10} if title else {"fontsize": 12, "fontweight": "bold"}
        axes.set_title(
            _title(picture), loc="left", parse_math=False, color=INK, wrap=True, **size
        )
        if shares_x:
            axes.label_outer()
        series_handles = axes.get_legend_handles_labels()[0]
        handles += series_handles if len(series_handles) > 1 else []
    if title:
        heading: dict[str, Any] = {
            "x": 0.01,
            "ha": "left",
            "fontsize": 12,
            "fontweight": "bold",
        }
        figure.suptitle(one_line(title, 90), parse_math=False, color=INK, **heading)
    if handles:
        longest = max(len(handle.get_label()) for handle in handles)
        columns = 2 if longest > 34 else 3
        style: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 8.5}
        legend = figure.legend(handles=handles, loc="outside lower center", **style)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
            entry.set_text(one_line(entry.get_text(), LONGEST_NAME))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _height(picture: Picture) -> float:
    legend = 0.2 * ((len(picture.series) + bool(picture.bands) + 2) // 3)
    bars = min(len(picture.y.categories), MOST_BARS)
    return 1.9 + 0.36 * bars + legend if bars else max(5.2, 5.0 + legend)


def _draw(axes: "Axes", picture: Picture) -> None:
    for index, (start, end) in enumerate(picture.bands):
        label = None if index else picture.bands_text
        axes.axvspan(start, end, color=SHADE, zorder=0, label=label)
    rows = {name: row for row, name in enumerate(picture.y.categories[:MOST_BARS])}
    lefts = np.zeros(len(rows))
    top: np.ndarray = np.zeros(1)
    for series in picture.series:
        if series.shape is Shape.bars:
            _draw_bars(axes, series, rows, lefts)
        elif series.shape is Shape.area:
            top = _draw_area(axes, series, top)
        elif series.shape is Shape.cells:
            _draw_cells(axes, series)
        else:
            _draw_line(axes, series, rows)
    for index, (height, text) in enumerate(picture.rules):
        color = RULE_COLORS[index % len(RULE_COLORS)]
        axes.axhline(height, color=color, linestyle=DASHED, linewidth=1.3, label=text)
    _set_axes(axes, picture)
    for mark in picture.labels:
        offset, across, up = OFFSETS[mark.side]
        position: dict[str, Any] = {"xytext": offset, "textcoords": "offset points"}
        look: dict[str, Any] = {
            "ha": across,
            "va": up,
            "fontsize": 8,
            "color": INK,
            "bbox": PAPER,
        }
        axes.annotate(mark.text, (mark.x, mark.y), parse_math=False, **position, **look)


def _title(picture: Picture) -> str:
    """Title, with a note if rows of bars are left out."""
    count = len(picture.y.categories)
    note = f" (the first {MOST_BARS:,} of {count:,} rows)" if count > MOST_BARS else ""
    return picture.title + note


def _draw_bars(
    axes: "Axes", series: Series, rows: Mapping[str, int], lefts: np.ndarray
) -> None:
    """Draw bars that begin at ``lefts``, and move these to their ends."""
    mask = [name in rows for name in series.y]
    places = [rows[str(name)] for name in series.y if name in rows]
    sizes = np.asarray(series.x, dtype=float)[mask]
    look: dict[str, Any] = {
        "color": series.color,
        "edgecolor": "white",
        "hatch": series.hatch * 2,
        "linewidth": 0.5,
    }
    axes.barh(places, sizes, left=lefts[places], height=0.62, label=series.name, **look)
    lefts[places] += sizes


def _draw_area(axes: "Axes", series: Series, floor: np.ndarray) -> np.ndarray:
    """Draw an area above ``floor``; return its upper edge."""
    top = floor + np.asarray(series.y, dtype=float)
    look: dict[str, Any] = {
        "facecolor": series.color,
        "edgecolor": "white",
        "hatch": series.hatch,
        "linewidth": 0.0,
    }
    axes.fill_between(series.x, floor, top, label=series.name, step="post", **look)
    return np.asarray(top)


def _draw_cells(axes: "Axes", series: Series) -> None:
    """Draw cells that are white at 1, with their numbers where these fit."""
    from matplotlib.colors import TwoSlopeNorm

    assert series.cells is not None
    highest = max(2.0, float(series.cells.max()))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=highest)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(series.cells, cmap="RdBu_r", norm=norm, zorder=1, **look)
    ticks = [0.0, 0.5, 1.0, (1 + highest) / 2, highest]
    bar = axes.figure.colorbar(
        image, cax=axes.inset_axes((1.015, 0.0, 0.02, 1.0)), ticks=ticks
    )
    bar.ax.set_yticklabels(
        [f"{tick:.2g}x" if tick < 10 else f"{tick:.0f}x" for tick in ticks]
    )
    if len(series.x) <= MOST_NUMBERS[0] and len(series.y) <= MOST_NUMBERS[1]:
        for (row, column), value in np.ndenumerate(series.cells):
            color = "w" if abs(norm(value) - 0.5) > 0.3 else "k"
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color=color,
            )


def _draw_line(axes: "Axes", series: Series, rows: Mapping[str, int]) -> None:
    x = np.asarray(series.x, dtype=float)
    # A row that is left out becomes NaN
    y = np.array(
        [rows.get(v) if isinstance(v, str) else v for v in series.y], dtype=float
    )
    color = INK if series.ink else series.color
    symbol = SYMBOLS[series.marker]
    look: dict[str, Any]
    if series.shape is Shape.points:
        if series.low:
            spread = np.array([x - np.asarray(series.low), np.asarray(series.high) - x])
            look = {"ecolor": color, "elinewidth": 1.1, "capsize": 2.5, "zorder": 3}
            axes.errorbar(x, y, xerr=spread, fmt="none", **look)
        look = {
            "markersize": 8,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "zorder": 4,
        }
        if series.faint:
            look = {"markersize": 3, "markeredgewidth": 0, "alpha": 0.5}
        axes.plot(x, y, symbol, color=color, label=series.name, **look)
        return
    steps = series.shape is Shape.steps
    style, width, alpha = (
        ("solid", 0.9, 0.4) if series.faint else (series.dash, 1.6, 1.0)
    )
    look = {
        "color": color,
        "alpha": alpha,
        "linewidth": width,
        "linestyle": STYLES[style],
    }
    if series.marked:
        look |= {"marker": symbol, "markersize": 3.5}
    axes.plot(
        x, y, drawstyle="steps-post" if steps else "default", label=series.name, **look
    )


def _set_axes(axes: "Axes", picture: Picture) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for axis, settings, set_scale in (
        (axes.xaxis, picture.x, axes.set_xscale),
        (axes.yaxis, picture.y, axes.set_yscale),
    ):
        axis.set_label_text(settings.text, color=INK, parse_math=False)
        if settings.log:
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(NullFormatter())
        elif settings.integer:
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        elif (
            not settings.categories
            and max(map(abs, axis.get_view_interval())) >= 10_000
        ):
            axis.set_major_formatter("{x:,.0f}")
    categories = [
        one_line(name, LONGEST_NAME) for name in picture.y.categories[:MOST_BARS]
    ]
    if categories:
        axes.set_yticks(range(len(categories)), categories)
        for text in axes.get_yticklabels():
            text.set_parse_math(False)
        axes.set_ylim(len(categories) - 0.4, -0.6)
    elif picture.is_fixed and picture.ranges:
        axes.set_xlim(*picture.ranges[0])
        axes.set_ylim(*picture.ranges[1])
    else:
        axes.margins(x=0.015)
    if picture.x.from_zero:
        axes.set_xlim(left=0)
    if picture.y.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.6, axis="x" if categories else "both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
