"""Pictures: their contents, the agreement of both renderers, and the memory timeline that they
show."""

import dataclasses
import gc
import gzip
import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.results import summarize
from fsdptoys.plan.search.ranking import pareto_front
from fsdptoys.profiler.memory_snapshot_page import read_timeline as read_events
from fsdptoys.report.breakdown_figures import PlottedRun
from fsdptoys.report.comparison_figures import draw_comparison, draw_tradeoff
from fsdptoys.report.figures_plotly import figure
from fsdptoys.report.memory_timeline import (
    Block,
    Lifetime,
    Phases,
    Timeline,
    lifetime,
    phase_of_stack,
    read_snapshot,
    read_timeline,
    read_trace,
)
from fsdptoys.report.run_figures import draw_run
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils import figure_png as png
from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import COLORS, GRAY, Axis, Picture, Series, place_labels, thin
from tests.harness.ranks import run_ranks
from tests.harness.recorded_runs import write_run
from tests.harness.snapshots import make_snapshot
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


ROWS, WIDTH = 64, 256


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, list[int], int]:
    """Two real steps: the timeline, the profiler's own counter, and the bytes of all parameters.

    In a fork: the profiler would also record memory that other tests hold or free.
    """
    folder = tmp_path_factory.mktemp("profile")
    (parameter_bytes,) = run_ranks(1, trace_steps, folder)
    trace = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))
    events = [e for e in trace["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    timeline = read_timeline(folder, "cpu")
    assert timeline is not None
    return timeline, [e["args"]["Total Allocated"] for e in events], parameter_bytes


def trace_steps(folder: Path) -> int:
    """Write the trace of two real steps; return the bytes of all parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, 16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(ROWS) % 16
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for step in (1, 2):
            with record_function(f"ProfilerStep#{step}"):
                torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    plain = folder / "rank0.json"
    profiler.export_chrome_trace(str(plain))
    (folder / "rank0.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return sum(parameter.nbytes for parameter in model.parameters())


def test_lifetimes_add_up_to_the_profilers_own_counter(
    traced: tuple[Timeline, list[int], int],
) -> None:
    """Oracle: "Total Allocated" of PyTorch's profiler, at its highest and at its last event."""
    timeline, counter, _ = traced
    assert timeline.total.max() == max(counter)
    assert timeline.total[-1] == counter[-1]


def test_gradients_are_as_large_as_the_parameters(traced: tuple[Timeline, list[int], int]) -> None:
    """Oracle: in one process every parameter has one gradient of its size, from the backward to
    zero_grad."""
    timeline, _, parameter_bytes = traced
    assert timeline.layers[Lifetime.gradients].max() == pytest.approx(parameter_bytes, rel=0.02)
    assert len(timeline.backwards) == 2
    assert not timeline.knows_before


def test_activations_are_the_tensors_saved_for_the_backward(
    traced: tuple[Timeline, list[int], int],
) -> None:
    """Oracle: the embedding's, the first layer's and GELU's outputs of ROWS x WIDTH floats must be
    kept."""
    timeline, _, _ = traced
    kept = timeline.layers[Lifetime.activations].max()
    assert 3 * ROWS * WIDTH * 4 <= kept <= 4 * ROWS * WIDTH * 4


def test_snapshot_peak_equals_that_of_its_own_page(tmp_path: Path) -> None:
    """Oracle: the profiler's walk over the same history, back from its end, where a block is 512
    bytes short."""
    (tmp_path / "memory-rank0.pickle").write_bytes(pickle.dumps(make_snapshot()))
    timeline = read_timeline(tmp_path, "cuda")
    events = read_events(make_snapshot(), 1)
    assert timeline is not None
    assert timeline.total.max() == pytest.approx(max(events.live_bytes), abs=512)
    assert timeline.total[-1] == pytest.approx(events.live_bytes[-1], abs=512)
    assert timeline.knows_before


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0.5, 0.6, Lifetime.temporary),
        (0.5, 1.5, Lifetime.activations),
        (1.5, 2.5, Lifetime.gradients),
        (1.5, np.inf, Lifetime.gradients),
        (2.5, np.inf, Lifetime.kept),
        (0.5, 2.5, Lifetime.other),
        (-np.inf, 1.0, Lifetime.before),
    ],
)
def test_block_is_classified_by_the_phases_of_its_begin_and_end(
    begin: float, end: float, expected: Lifetime
) -> None:
    """Oracle: the definitions of the lifetimes."""
    phases = Phases([0.0, 1.0, 2.0], ["forward", "backward", "update"])
    assert lifetime(Block(1, begin, end), phases) is expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["fsdptoys/train/trainer.py train_step"], "forward"),
        (
            ["fsdptoys/memory/optimizer_stepper.py step", "fsdptoys/train/trainer.py train_step"],
            "update",
        ),
        (["fsdptoys/train/trainer.py _update", "fsdptoys/train/trainer.py _train_step"], "update"),
        (
            [
                "torch/autograd/graph.py _engine_run_backward",
                "fsdptoys/train/trainer.py train_step",
            ],
            "backward",
        ),
        ([], "backward"),
    ],
)
def test_stack_identifies_the_phase(names: list[str], expected: str) -> None:
    """Oracle: the trainer's own functions; autograd's thread has no Python below it."""
    calls = [name.split() for name in names]
    assert (
        phase_of_stack(
            [{"filename": f"/src/{file}", "name": name, "line": 1} for file, name in calls]
        )
        == expected
    )


class Touch:
    """Runs a command when it is unpickled by an ordinary unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """Oracle: the folder that the code would make does not exist."""
    path = tmp_path / "memory-rank0.pickle"
    path.write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    with pytest.raises(ConfigError, match=r"asks for (posix|nt)\.mkdir"):
        read_snapshot(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b'{"traceEvents": [{"name": "[memory]"}]}', mtime=0)],
)
def test_unreadable_trace_is_reported_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    """Oracle: the message names the file and a fix."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank0\.json\.gz cannot be read .*profile\.memory=true"):
        read_trace(path, "cpu")


def test_trace_without_memory_has_no_timeline(tmp_path: Path) -> None:
    """Oracle: profile.memory=false leaves no event of memory; other events may hold numbers beyond
    JSON."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(
        gzip.compress(
            b'{"traceEvents": [{"name": "mul", "args": {"Concrete Inputs": [NaN, Infinity]}}]}'
        )
    )
    assert read_trace(path, "cpu") is None
