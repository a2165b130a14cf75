"""``result.json``: everything that ``summary.md`` shows, and files of other programs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.device import Device
from fsdptoys.metrics import Console, MetricsConfig, ResumePoint, RunRecorder, environment
from fsdptoys.metrics.compilation import Compilations, Recompilation
from fsdptoys.metrics.results import FORMAT_VERSION, Operator, ProfileResult, RunStatus, read_result
from fsdptoys.metrics.step import RoutingMetrics
from fsdptoys.metrics.summary import render_summary
from fsdptoys.utils.foreign import ForeignError
from tests.metrics.test_prediction import PREDICTION
from tests.report.recorded_runs import GPU_STEP

TREE = {"train": {"steps": 4, "note": "|`ü\u2028"}, "data": {"files": ["a", None, 1e-5, math.inf]}}
PROFILE = ProfileResult(
    0, (0, 1), "rank0.json.gz", "step 2", (Operator("a|b", 1350, 12.5e3, 1.0, None, 2**21),), ("memory.html",)
)
COMPILATION = Compilations(
    3, 1.25, (Recompilation(2, "training", "forward", "`x` 8 → 16", False),), {"data-dependent branch": 2}
)


def record(folder: Path, resumes: bool = False, **ending: Any) -> None:
    """Record three steps with everything that a run may have, the second one resumed in the folder of the first."""
    config = MetricsConfig(run_dir=str(folder), console=Console.none, warmup_steps=1)
    start = environment(Device("cpu"), 2, ["fsdptoys", "train", "a b"])
    resumed = ResumePoint(0, {}, None) if resumes else None
    routing = RoutingMetrics(2.0, math.inf, 0.9, 1.5, 0.5, [[7, 1]])
    steps = [replace(GPU_STEP, step=number, routing=routing) for number in (1, 2, 3)]
    steps[1] = replace(steps[1], loss=math.nan, skipped=True, skipped_steps=1)
    with RunRecorder(
        config, "a | run", TREE, start, 4, {"uniform": 5.5, "none": math.nan}, resumed, prediction=PREDICTION
    ) as recorder:
        for metrics in steps:
            recorder.step(metrics)
        if ending:
            recorder.finish("SIGTERM\nreceived", RunStatus.stopped, **ending)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(
    "ending",
    [
        {"sample": "x\n```\n\x1b[2J", "profile": PROFILE, "compilation": COMPILATION},
        {"profile": ProfileResult(0, (1,))},
    ],
)
def test_summary_is_rendered_from_the_file(tmp_path: Path, resumes: bool, ending: dict[str, Any]) -> None:
    """Oracle: the summary's bytes."""
    if resumes:
        record(tmp_path, **ending)
    record(tmp_path, resumes, **ending)
    result = read_result(tmp_path)
    assert result is not None and render_summary(result) == (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert result.status is RunStatus.stopped and len(result.resumes) == resumes and len(result.prediction) > 2
    tree = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert tree["format_version"] == FORMAT_VERSION
    assert tree["steps"]["routing"]["z_loss"] == "inf" and tree["references_nats"] == {"uniform": 5.5, "none": "nan"}
    assert tree["steps"]["memory_peak_gib"] == GPU_STEP.memory_peak_gib and tree["steps"]["eval_loss"] is None


def test_resumed_run_removes_the_results_of_the_previous_start(tmp_path: Path) -> None:
    """Oracle: the file, moved with the other files of that start; a killed start leaves no results."""
    record(tmp_path, sample=None)
    record(tmp_path, resumes=True)
    assert read_result(tmp_path) is None and read_result(tmp_path / "attempt-1") is not None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Record a run, and read its results as JSON."""
    folder = tmp_path_factory.mktemp("run")
    record(folder, sample=None)
    tree: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return tree


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": FORMAT_VERSION + 1}, "its format_version is 2, and this version reads up to 1"),
        ({"planned_steps": "4"}, "planned_steps is '4', not an integer"),
        ({"wall_seconds": "soon"}, "wall_seconds is 'soon', not"),
        ({"status": "well"}, r"status is 'well', not done \| stopped \| failed"),
        ({"steps": None}, "steps is null, not a mapping"),
        ({"resumes": [{"time": 1}]}, r"resumes\[0\].time is 1, not text"),
    ],
)
def test_invalid_file_is_reported_in_one_sentence(
    tmp_path: Path, recorded: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    """Oracle: the key and the value; a key of a later version is ignored."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(recorded | {"later": 1}))
    assert read_result(tmp_path) is not None
    path.write_text(json.dumps(recorded | changes))
    with pytest.raises(ForeignError, match=words):
        read_result(tmp_path)
