"""Pictures: their contents, and the agreement of both renderers."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fsdptoys.metrics.results import summarize
from fsdptoys.plan.search.ranking import pareto_front
from fsdptoys.report.breakdown_figures import PlottedRun
from fsdptoys.report.comparison_figures import draw_comparison, draw_tradeoff
from fsdptoys.report.figures_plotly import figure
from fsdptoys.report.memory_timeline import read_timeline
from fsdptoys.report.run_figures import draw_run
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils import figure_png as png
from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import COLORS, GRAY, Axis, Picture, Series, place_labels, thin
from tests.harness.recorded_runs import write_run
from tests.report.device_runs import JOBS, device_prediction, device_steps, write_device_run

SIX = Axis("", categories=tuple(f"run{n}" for n in range(1, 7)))
PAPERS = ("#ffffff", "#14181d")
"""Background colors of the page, light and dark."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[PlottedRun]:
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for number, (_, _, _, seconds, gib) in enumerate(JOBS, 1):
        prediction = None if number == 3 else device_prediction(seconds, gib)
        steps = device_steps(60, seconds, gib)
        run = write_run(
            folder / f"run{number}",
            steps,
            environment={"device.type": "cuda"},
            prediction=prediction,
        )
        found.append(PlottedRun(f"run{number}", read_recorded_run(run), (f"number={number}",)))
    return found


@pytest.fixture(scope="module")
def pictures(shown: list[PlottedRun], tmp_path_factory: pytest.TempPathFactory) -> list[Picture]:
    run = read_recorded_run(write_device_run(tmp_path_factory.mktemp("runs") / "one"))
    return [
        *draw_comparison(shown),
        *draw_run(run, read_timeline(run.path / "profile", run.device_type)),
    ]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("color", [*COLORS, GRAY])
def test_every_color_contrasts_with_the_page(color: str, paper: str) -> None:
    """Oracle: WCAG 2.1, 1.4.11: graphics have a contrast of 3:1 at least."""
    bright, dark = sorted((luminance(color), luminance(paper)), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 3


def test_thirty_series_have_distinct_styles() -> None:
    """Oracle: color, marker and dashes together; not by color alone."""
    looks = [Series(str(n), None, [], [], n) for n in range(30)]  # type: ignore[arg-type]
    assert len({(one.color, one.marker, one.dash) for one in looks}) == 30
    assert all(a.marker != b.marker for a, b in itertools.pairwise(looks))


def test_thinning_keeps_extremes_and_gaps() -> None:
    """Oracle: the lowest and highest of each stretch in the long line itself."""
    x = np.arange(5000)
    y = np.sin(x / 50) + 5.0 * (x == 1234) - 7.0 * (x == 4321)
    y[2000:2100] = np.nan
    few_x, (few_y,), width = thin(x, y, most=500)
    assert len(few_x) < 700 and width == 20
    for start in range(0, 5000, width):
        whole, part = y[start : start + width], few_y[(few_x >= start) & (few_x < start + width)]
        if np.isfinite(whole).any():
            assert np.nanmin(part) == np.nanmin(whole) and np.nanmax(part) == np.nanmax(whole)
        assert np.isnan(part).any() == np.isnan(whole).any()
    assert list(few_x) == sorted(few_x) and few_x[-1] == 4999


def test_labels_cover_neither_points_nor_one_another() -> None:
    """Oracle: the boxes, computed here from the chosen sides."""
    points = [(0.5 + 0.02 * (n % 4), 0.5 + 0.03 * (n // 4)) for n in range(12)] + [
        (0.995, 0.99),
        (0.002, 0.01),
    ]
    placed = place_labels(points, [(n, f"name {n}") for n in range(len(points))])
    assert len(placed) >= 4
    boxes = []
    for index, text, side in placed:
        (x, y), wide, high = points[index], 0.0085 * len(text), 0.05
        left = {"right": x + 0.012, "left": x - 0.012 - wide}.get(side, x - wide / 2)
        bottom = {"above": y + 0.022, "below": y - 0.022 - high}.get(side, y - high / 2)
        assert left >= 0 and bottom >= 0 and left + wide <= 1 and bottom + high <= 1
        assert not any(left < px < left + wide and bottom < py < bottom + high for px, py in points)
        boxes.append((left, bottom, left + wide, bottom + high))
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_frontier_has_the_undominated_runs(shown: list[PlottedRun]) -> None:
    """Oracle: comparing every pair of runs."""
    picture = draw_tradeoff(shown)
    assert picture is not None
    places = [(1e3 * seconds, gib) for _, _, _, seconds, gib in JOBS]
    beaten = {
        i for i, a in enumerate(places) for b in places if b != a and b[0] <= a[0] and b[1] <= a[1]
    }
    assert set(pareto_front(places)) == set(range(len(places))) - beaten
    assert set(picture.series[0].hover) == {
        f"run{n + 1}" for n in range(len(places)) if n not in beaten
    }


def test_runs_of_different_batches_are_compared_by_their_tokens(shown: list[PlottedRun]) -> None:
    """Oracle: a run of half the tokens a step in half the time is no faster."""
    other = shown[0].run
    halves = [
        dataclasses.replace(
            m,
            valid_tokens=m.valid_tokens // 2,
            step_time_seconds=m.step_time_seconds / 2,
            tokens_per_second=(m.valid_tokens // 2) / (m.step_time_seconds / 2),
        )
        for m in other.steps
    ]
    half = PlottedRun(
        "half", dataclasses.replace(other, steps=halves, results=summarize(halves, 2)), ()
    )
    picture = draw_tradeoff([shown[0], half])
    assert picture is not None
    assert "1,000 tokens" in picture.x.title and "different numbers of tokens" in picture.caption
    assert half.run.results.step_time_seconds != other.results.step_time_seconds
    assert picture.series[1].x == pytest.approx(picture.series[2].x)


def test_bars_add_up_to_the_prediction(shown: list[PlottedRun]) -> None:
    """Oracle: the predicted peak and step time themselves; a run without a prediction has its
    measured total."""
    named = {picture.name: picture for picture in draw_comparison(shown)}
    for name, of in (
        ("time_split", lambda p: p.time.step_seconds * 1e3),
        ("memory_split", lambda p: p.memory.peak_bytes / 2**30),
    ):
        for one in shown:
            parts = [
                size
                for series in named[name].series
                if series.shape.value == "bars"
                for size, y in zip(series.x, series.y, strict=True)
                if y == one.name
            ]
            prediction = one.run.prediction
            if prediction is not None:
                assert sum(parts) == pytest.approx(of(prediction))
            else:
                assert len(parts) == 1 and "Gray: measured totals of run3" in named[name].caption


def test_bars_beyond_the_height_of_a_png_are_cut_with_a_note(
    shown: list[PlottedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the picture's own height, compared with one of the allowed number of rows."""
    monkeypatch.setattr(png, "MOST_BARS", 3)
    for name, count in (("many", 6), ("few", 3)):
        picture = next(one for one in draw_comparison(shown[:count]) if one.name == "time_split")
        draw_png(tmp_path / f"{name}.png", picture)
    with Image.open(tmp_path / "many.png") as many, Image.open(tmp_path / "few.png") as few:
        assert many.height == few.height
    assert png._first_bars(picture) is picture
    assert "the first 3 of 6 rows" in png._first_bars(dataclasses.replace(picture, y=SIX)).title


def test_every_series_becomes_a_trace(pictures: list[Picture]) -> None:
    """Oracle: plotly's own validation, and the names of the series."""
    assert len(pictures) == 14
    for picture in pictures:
        made = figure(picture)
        assert [trace["meta"] for trace in made["data"]] == [
            series.name for series in picture.series
        ]
        assert picture.alt and picture.caption and picture.title


def test_twenty_runs_of_five_thousand_steps_stay_small(shown: list[PlottedRun]) -> None:
    """Oracle: the JSON of all pictures next to plotly's own 4.8 MB; captions name the omitted
    series."""
    long = dataclasses.replace(shown[0].run, steps=device_steps(5000, 0.5, 70.0))
    pictures = draw_comparison([PlottedRun(f"run {n}", long, ()) for n in range(20)])
    assert sum(len(json.dumps(figure(picture))) for picture in pictures) < 2_500_000
    assert all(
        "lowest and the highest are drawn" in p.caption
        for p in pictures
        if p.name in ("losses", "step_time")
    )
