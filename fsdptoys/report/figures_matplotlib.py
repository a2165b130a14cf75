"""Render figures as PNG files with matplotlib, in light colors and with a legend."""

import dataclasses
import io
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdptoys.metrics.plots import shorten
from fsdptoys.utils.atomic_write import write_atomically

from .figures import MARKERS, Picture, Series, Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID, SHADE = "#20262c", "#d9dde1", "#eef1f4"
SYMBOLS = dict(zip(MARKERS, "osD^PvX", strict=True))
STYLES: dict[str, Any] = {"solid": "-", "dash": (0, (6, 3)), "dot": (0, (1.5, 2)), "dashdot": (0, (6, 2, 1.5, 2))}
OFFSETS = {
    "right": ((8, 0), "left", "center"),
    "left": ((-8, 0), "right", "center"),
    "above": ((0, 8), "center", "bottom"),
    "below": ((0, -8), "center", "top"),
}
LONGEST_NAME = 48
MOST_BARS = 250  # Rows of one PNG: more are unreadable, and matplotlib cannot draw the height of 1,214 or more


def draw_png(picture: Picture, path: Path) -> None:
    """Write a figure as PNG; needs no display and leaves pyplot's global state alone."""
    from matplotlib.figure import Figure  # 0.7 s to import

    picture = _first_bars(picture)
    names = len(picture.series) + bool(picture.bands)
    height = 5.2 + 0.2 * max(0, (names + 2) // 3 - 1)
    if picture.y.categories:
        height = 1.9 + 0.36 * len(picture.y.categories) + 0.2 * ((names + 2) // 3)
    figure = Figure(figsize=(9, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(picture.title, loc="left", fontsize=12, fontweight="bold", parse_math=False, color=INK)
    for index, (start, end) in enumerate(picture.bands):
        axes.axvspan(start, end, color=SHADE, zorder=0, label=None if index else picture.bands_text)
    lefts: dict[str, float] = dict.fromkeys(picture.y.categories, 0.0)
    top: np.ndarray = np.zeros(1)
    for series in picture.series:
        if series.shape is Shape.bars:
            _draw_bars(axes, series, picture.y.categories, lefts)
        elif series.shape is Shape.area:
            top = _draw_area(axes, series, top)
        else:
            _draw_line(axes, series, picture.y.categories)
    for at, text in picture.rules:
        axes.axhline(at, color=INK, linestyle=(0, (5, 3)), linewidth=1.1, label=text)
    _set_axes(axes, picture)
    for label in picture.labels:
        offset, across, up = OFFSETS[label.side]
        place: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "ha": across, "va": up}
        axes.annotate(label.text, (label.x, label.y), fontsize=8, color=INK, parse_math=False, **place)
    if names + len(picture.rules) > 1:
        columns = 2 if max(len(series.name) for series in picture.series) > 34 else 3
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
            entry.set_text(shorten(entry.get_text(), LONGEST_NAME))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _first_bars(picture: Picture) -> Picture:
    """Truncate a bar chart to ``MOST_BARS`` rows, with a note in the title."""
    rows = picture.y.categories
    if len(rows) <= MOST_BARS:
        return picture
    kept = rows[:MOST_BARS]
    return dataclasses.replace(
        picture,
        title=f"{picture.title} (the first {MOST_BARS:,} of {len(rows):,} rows)",
        y=dataclasses.replace(picture.y, categories=kept),
        series=tuple(one for one in (_of_rows(series, frozenset(kept)) for series in picture.series) if len(one.x)),
    )


def _of_rows(series: Series, rows: frozenset[str]) -> Series:
    kept = [name in rows for name in series.y]
    by_row = ("x", "y", "hover", "low", "high")
    parts: dict[str, Any] = {part: tuple(compress(getattr(series, part), kept)) for part in by_row}
    return dataclasses.replace(series, **parts)


def _draw_bars(axes: "Axes", series: Series, categories: tuple[str, ...], lefts: dict[str, float]) -> None:
    names = [str(name) for name in series.y]
    rows, sizes = [categories.index(name) for name in names], np.asarray(series.x, dtype=float)
    look: dict[str, Any] = {"color": series.color, "edgecolor": "white", "hatch": series.hatch * 2, "linewidth": 0.5}
    axes.barh(rows, sizes, left=[lefts[name] for name in names], height=0.62, label=series.name, **look)
    for name, size in zip(names, series.x, strict=True):
        lefts[name] += size


def _draw_area(axes: "Axes", series: Series, floor: np.ndarray) -> np.ndarray:
    """Draw an area above ``floor``; return its upper edge."""
    top = floor + np.asarray(series.y, dtype=float)
    look: dict[str, Any] = {"facecolor": series.color, "edgecolor": "white", "hatch": series.hatch, "linewidth": 0.0}
    axes.fill_between(series.x, floor, top, label=series.name, step="post", **look)
    return np.asarray(top)


def _draw_line(axes: "Axes", series: Series, categories: tuple[str, ...]) -> None:
    x = np.asarray(series.x, dtype=float)
    y = np.array([categories.index(v) if isinstance(v, str) else v for v in series.y], dtype=float)
    color = INK if series.ink else series.color
    symbol = SYMBOLS[series.marker]
    look: dict[str, Any]
    if series.shape is Shape.points:
        if series.low:
            spread = np.array([x - np.asarray(series.low), np.asarray(series.high) - x])
            axes.errorbar(x, y, xerr=spread, fmt="none", ecolor=color, elinewidth=1.1, capsize=2.5, zorder=3)
        look = {"markersize": 8, "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 4}
        axes.plot(x, y, symbol, color=color, label=series.name, **look)
        return
    steps = series.shape is Shape.steps
    style, width, alpha = ("solid", 0.9, 0.4) if series.faint else (series.dash, 1.6, 1.0)
    look = {"color": color, "alpha": alpha, "linewidth": width, "linestyle": STYLES[style]}
    if series.marked and not steps:
        look |= {"marker": symbol, "markersize": 3.5}
    axes.plot(x, y, drawstyle="steps-post" if steps else "default", label=series.name, **look)


def _set_axes(axes: "Axes", picture: Picture) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for axis, given, set_scale in ((axes.xaxis, picture.x, axes.set_xscale), (axes.yaxis, picture.y, axes.set_yscale)):
        axis.set_label_text(given.text, color=INK, parse_math=False)
        if given.log:
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(NullFormatter())
        elif given.integer:
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        elif not given.categories and max(map(abs, axis.get_view_interval())) >= 10_000:
            axis.set_major_formatter("{x:,.0f}")
    categories = picture.y.categories
    if categories:
        axes.set_yticks(range(len(categories)), [shorten(name, LONGEST_NAME) for name in categories])
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
    if picture.diagonal and picture.ranges:
        axes.plot(*picture.ranges, color=INK, linestyle=(0, (5, 3)), linewidth=1.1, label="predicted = measured")
    axes.grid(color=GRID, linewidth=0.6, axis="x" if categories else "both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
