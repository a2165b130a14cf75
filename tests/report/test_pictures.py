"""Pictures: their contents, and the agreement of both renderers."""

import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image

from fsdptoys.metrics.results import summarize
from fsdptoys.plan.search.ranking import pareto_front
from fsdptoys.report.breakdown_figures import PlottedRun, draw_time_split
from fsdptoys.report.comparison_figures import draw_comparison, draw_tradeoff
from fsdptoys.report.figures_plotly import figure
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils import figure_png as png
from fsdptoys.utils.figures import COLORS, GRAY, Shape, thin
from tests.harness.recorded_runs import write_run
from tests.report.device_runs import JOBS, device_prediction, device_steps

PAPERS = ("#ffffff", "#14181d")
"""Background colors of the page, light and dark."""


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> list[PlottedRun]:
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for number, (_, _, _, seconds, gib) in enumerate(JOBS, 1):
        prediction = None if number == 3 else device_prediction(seconds, gib)
        steps = device_steps(60, seconds, gib)
        run = write_run(
            folder / f"run{number}",
            steps,
            environment={"device.type": "cuda"},
            prediction=prediction,
        )
        runs.append(
            PlottedRun(f"run{number}", read_recorded_run(run), (f"number={number}",))
        )
    return runs


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("color", [*COLORS, GRAY])
def test_every_color_contrasts_with_the_page(color: str, paper: str) -> None:
    """Oracle: WCAG 2.1, 1.4.11: graphics have a contrast of 3:1 at least."""
    bright, dark = sorted((luminance(color), luminance(paper)), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 3


def test_thinning_keeps_extremes_and_gaps() -> None:
    """Oracle: the lowest and highest of each stretch in the long line itself."""
    x = np.arange(5000)
    y = np.sin(x / 50) + 5.0 * (x == 1234) - 7.0 * (x == 4321)
    y[2000:2100] = np.nan
    few_x, (few_y,), width = thin(x, y, most=500)
    assert len(few_x) < 700 and width == 20
    for start in range(0, 5000, width):
        whole = y[start : start + width]
        part = few_y[(few_x >= start) & (few_x < start + width)]
        if np.isfinite(whole).any():
            assert np.nanmin(part) == np.nanmin(whole) and np.nanmax(part) == np.nanmax(
                whole
            )
        assert np.isnan(part).any() == np.isnan(whole).any()
    assert list(few_x) == sorted(few_x) and few_x[-1] == 4999


def test_runs_of_different_batches_are_compared_by_their_tokens(
    plotted: list[PlottedRun],
) -> None:
    """Oracle: a run of half the tokens a step in half the time is no faster."""
    other = plotted[0].run
    halves = [
        dataclasses.replace(
            m,
            valid_tokens=m.valid_tokens // 2,
            step_time_seconds=m.step_time_seconds / 2,
        )
        for m in other.steps
    ]
    half = dataclasses.replace(other, steps=halves, results=summarize(halves, 2))
    picture = draw_tradeoff([plotted[0], PlottedRun("half", half, ())])
    assert picture is not None
    assert (
        "1,000 tokens" in picture.x.title
        and "different numbers of tokens" in picture.caption
    )
    assert picture.series[1].x == pytest.approx(picture.series[2].x)


def test_bars_add_up_to_the_prediction(plotted: list[PlottedRun]) -> None:
    """Oracle: the predicted step time itself; a run without a prediction has its measured total."""
    picture = draw_time_split(plotted)
    assert picture is not None and "Gray: measured totals of run3" in picture.caption
    for one in plotted:
        parts = [
            size
            for series in picture.series
            if series.shape is Shape.bars
            for size, name in zip(series.x, series.y, strict=True)
            if name == one.name
        ]
        if one.run.prediction is not None:
            assert sum(parts) == pytest.approx(
                one.run.prediction.time.step_seconds * 1e3
            )
        else:
            assert len(parts) == 1


def test_bars_beyond_the_height_of_a_png_are_cut(
    plotted: list[PlottedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the height of a picture with the allowed number of rows."""
    monkeypatch.setattr(png, "MOST_BARS", 3)
    heights = []
    for count in (6, 3):
        picture = draw_time_split(plotted[:count])
        assert picture is not None
        heights.append(Image.open(io.BytesIO(png.render_png(picture))).height)
    assert heights[0] == heights[1]


def test_twenty_runs_of_five_thousand_steps_stay_small(
    plotted: list[PlottedRun],
) -> None:
    """Oracle: the JSON of all pictures next to plotly's own 4.8 MB; captions name the omitted
    series."""
    long = dataclasses.replace(plotted[0].run, steps=device_steps(5000, 0.5, 70.0))
    pictures = draw_comparison([PlottedRun(f"run {n}", long, ()) for n in range(20)])
    assert sum(len(json.dumps(figure(picture))) for picture in pictures) < 2_500_000
    assert all(
        "lowest and the highest are drawn" in p.caption
        for p in pictures
        if p.name in ("losses", "step_time")
    )


def test_frontier_has_the_undominated_runs(plotted: list[PlottedRun]) -> None:
    """Oracle: comparing every pair of runs."""
    picture = draw_tradeoff(plotted)
    assert picture is not None
    places = [(1e3 * seconds, gib) for _, _, _, seconds, gib in JOBS]
    beaten = {
        i
        for i, a in enumerate(places)
        for b in places
        if b != a and b[0] <= a[0] and b[1] <= a[1]
    }
    assert set(pareto_front(places)) == set(range(len(places))) - beaten
    assert set(picture.series[0].hover) == {
        f"run{n + 1}" for n in range(len(places)) if n not in beaten
    }
