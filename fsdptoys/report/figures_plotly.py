"""Render figures interactively with plotly: JSON that the page's script passes to plotly.js.

The page's script sets the colors of axes, grid and text when it switches between light and dark. It
also makes the legends, as buttons, because plotly's own legends cannot be reached by keyboard.
"""

import html
import json
import math
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.figures import Axis, Picture, Series, Shape

HEIGHT = 420
BAR_HEIGHT = 30  # Pixels: height of a figure, and of each bar
INK = "black"  # Placeholder that the page's script replaces with the text color
SIDES = {
    "right": {"xanchor": "left", "xshift": 9},
    "left": {"xanchor": "right", "xshift": -9},
    "above": {"yanchor": "bottom", "yshift": 8},
    "below": {"yanchor": "top", "yshift": -8},
}
"""Position of a label relative to its point."""


def check_plotly() -> None:
    """Check that plotly is installed.

    Raises:
        ConfigError: if it is missing; names the extra to install.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as missing:
        raise ConfigError(
            "a page needs plotly, which is not installed; run pip install -e '.[report]', or ask "
            "for --table"
        ) from missing


def plotly_script() -> str:
    """The plotly.js bundle shipped with the Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def figure(picture: Picture) -> dict[str, Any]:
    """Data and layout of a figure as a JSON tree, validated by plotly."""
    import plotly.graph_objects as go  # most of a second to import

    plot = go.Figure(
        [_trace(go, picture, series) for series in picture.series], _layout(picture)
    )
    read: dict[str, Any] = json.loads(plot.to_json())
    read["layout"].pop("template", None)
    return read


def _trace(go: Any, picture: Picture, series: Series) -> Any:
    color = INK if series.ink else series.color
    y: Any = series.y
    if len(y) and isinstance(y[0], str):
        y = [html.escape(value) for value in y]
    common: dict[str, Any] = {
        "x": series.x,
        "y": y,
        "name": html.escape(series.name),
        "meta": series.name,
        "showlegend": False,
        "hovertemplate": "%{hovertext}<extra></extra>"
        if series.hover
        else _hover(picture, series),
        "hovertext": [
            "<br>".join(html.escape(text).split("\n")) for text in series.hover
        ]
        or None,
    }
    if series.shape is Shape.bars:
        pattern = {"shape": series.hatch, "solidity": 0.2, "fillmode": "overlay"}
        return go.Bar(
            orientation="h",
            marker={"color": color, "line": {"width": 0}, "pattern": pattern},
            **common,
        )
    if series.shape is Shape.points:
        marker = {
            "symbol": series.marker,
            "size": 11,
            "color": color,
            "line": {"width": 1},
        }
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [high - x for x, high in zip(series.x, series.high, strict=False)],
            "arrayminus": [
                x - low for x, low in zip(series.x, series.low, strict=False)
            ],
            "thickness": 1.4,
            "width": 4,
        }
        return go.Scatter(
            mode="markers",
            marker=marker,
            error_x=spread if series.low else None,
            **common,
        )
    if series.shape is Shape.area:
        pattern = {"shape": series.hatch, "solidity": 0.14, "fillmode": "overlay"}
        line = {"width": 0.6, "color": color, "shape": "hv"}
        return go.Scatter(stackgroup="one", line=line, fillpattern=pattern, **common)
    steps = series.shape is Shape.steps
    dash, width, opacity = ("solid", 1, 0.4) if series.faint else (series.dash, 2, 1.0)
    return go.Scatter(
        mode="lines+markers" if series.marked and not steps else "lines",
        line={
            "color": color,
            "dash": dash,
            "width": width,
            "shape": "hv" if steps else "linear",
        },
        marker={"symbol": series.marker, "size": 6},
        opacity=opacity,
        connectgaps=False,
        **common,
    )


def _hover(picture: Picture, series: Series) -> str:
    texts = [series.name, picture.x.text, picture.y.text or "row"]
    name, x, y = map(html.escape, texts)
    y_format = "" if picture.y.categories else ":,.5~g"
    return f"{name}<br>{x}: %{{x:,.7~g}}<br>{y}: %{{y{y_format}}}<extra></extra>"


def _layout(picture: Picture) -> dict[str, Any]:
    dashed = {"type": "line", "line": {"dash": "dash", "width": 1.3}}
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = [
        {
            "x": label.x,
            "y": label.y,
            "text": html.escape(label.text),
            "name": "label",
            "showarrow": False,
        }
        | SIDES[label.side]
        for label in picture.labels
    ]
    for at, text in picture.rules:
        shapes.append(
            {
                **dashed,
                "layer": "below",
                "y0": at,
                "y1": at,
                "x0": 0,
                "x1": 1,
                "xref": "paper",
            }
        )
        corner = {
            "x": 1,
            "xref": "paper",
            "y": at,
            "xanchor": "right",
            "yanchor": "bottom",
        }
        annotations.append({**corner, "text": html.escape(text), "showarrow": False})
    for start, end in picture.bands:
        corners = {"x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper"}
        shapes.append(
            {
                "type": "rect",
                **corners,
                "line": {"width": 0},
                "layer": "below",
                "name": "band",
            }
        )
    x_range, y_range = picture.ranges or (None, None)
    bars = len(picture.y.categories)
    return {
        "height": max(220, 110 + BAR_HEIGHT * bars) if bars else HEIGHT,
        "margin": {"l": 64, "r": 14, "t": 14, "b": 52},
        "xaxis": _axis(picture.x, x_range, picture.is_fixed),
        "yaxis": _axis(picture.y, y_range, picture.is_fixed),
        "barmode": "stack",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
        "shapes": shapes,
        "annotations": annotations,
    }


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """Write full numbers at minor ticks; plotly shows only their leading digit."""
    decades = math.log10(high / low)
    digits = (
        (1,)
        if decades > 4
        else (1, 2, 5)
        if decades > 0.8
        else (1, 1.5, 2, 3, 4, 5, 6, 8)
    )
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**power for power in powers for digit in digits]
    return {"tickvals": values, "ticktext": [f"{value:,.6g}" for value in values]}


def _axis(axis: Axis, ends: tuple[float, float] | None, fixed: bool) -> dict[str, Any]:
    """Settings of an axis for plotly; if ``fixed``, it spans exactly ``ends``, else plotly
    chooses."""
    settings: dict[str, Any] = {
        "title": {"text": html.escape(axis.text), "standoff": 8},
        "automargin": True,
    }
    if axis.categories:
        names = [html.escape(name) for name in axis.categories]
        settings |= {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names,
        }
        return settings | {"range": [len(names) - 0.4, -0.6], "fixedrange": True}
    settings |= {
        "type": "log" if axis.log else "linear",
        "exponentformat": "none",
        "separatethousands": True,
    }
    if axis.log and ends is not None:
        settings |= _log_ticks(*ends)
    if axis.integer:
        settings |= {"tickformat": ",d", "minallowed": 0}
    if axis.from_zero:
        settings["rangemode"] = "tozero"
    if ends is not None and fixed:
        settings["range"] = (
            [math.log10(end) for end in ends] if axis.log else list(ends)
        )
    return settings
