"""``result.json``: everything that ``summary.md`` shows, files of other programs, and predictions
with measurements."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.device import Device
from fsdptoys.metrics import (
    Console,
    MetricsConfig,
    ResumePoint,
    RunRecorder,
    StepMetrics,
    environment,
)
from fsdptoys.metrics.compilation import Compilations, Recompilation
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    Prediction,
    TimePrediction,
    prediction_line,
)
from fsdptoys.metrics.results import (
    FORMAT_VERSION,
    Operator,
    ProfileResult,
    RunStatus,
    prediction_errors,
    read_result,
    summarize,
)
from fsdptoys.metrics.step import RoutingMetrics
from fsdptoys.metrics.summary import render_summary
from fsdptoys.utils.foreign import ForeignError
from tests.harness.recorded_runs import GPU_STEP
from tests.harness.recording import ENVIRONMENT, STEP

TREE = {
    "train": {"steps": 4, "note": "|`ü\u2028"},
    "data": {"files": ["a", None, 1e-5, math.inf]},
}
GIB = 2**30
PREDICTION = Prediction(
    method="estimated",
    hardware="h100",
    world_size=8,
    tokens_per_step=8192,
    model_flops_per_step=1e14,
    peak_flops=1e15,
    memory=MemoryPrediction(
        10 * GIB, 20 * GIB, 24 * GIB, "backward", {Category.parameters: 4 * GIB}
    ),
    time=TimePrediction(0.5, 0.4, 0.05, 0.0, 0.05),
)
PROFILE = ProfileResult(
    0,
    (0, 1),
    "rank0.json.gz",
    "step 2",
    (Operator("a|b", 1350, 12.5e3, 1.0, None, 2**21),),
    ("memory.html",),
)
COMPILATION = Compilations(
    3,
    1.25,
    (Recompilation(2, "training", "forward", "`x` 8 → 16", False),),
    {"data-dependent branch": 2},
)


def record(folder: Path, resumes: bool = False, **ending: Any) -> None:
    """Record three steps with everything that a run may have, the second one resumed in the folder
    of the first."""
    config = MetricsConfig(run_dir=str(folder), console=Console.none, warmup_steps=1)
    start = environment(Device("cpu"), 2, ["fsdptoys", "train", "a b"])
    resumed = ResumePoint(0, {}, None) if resumes else None
    routing = RoutingMetrics(2.0, math.inf, 0.9, 1.5, 0.5, [[7, 1]])
    steps = [replace(GPU_STEP, step=number, routing=routing) for number in (1, 2, 3)]
    steps[1] = replace(steps[1], loss=math.nan, skipped=True, skipped_steps=1)
    with RunRecorder(
        config,
        "a | run",
        TREE,
        start,
        4,
        {"uniform": 5.5, "none": math.nan},
        resumed,
        prediction=PREDICTION,
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
def test_summary_is_rendered_from_the_file(
    tmp_path: Path, resumes: bool, ending: dict[str, Any]
) -> None:
    """Oracle: the summary's bytes."""
    if resumes:
        record(tmp_path, **ending)
    record(tmp_path, resumes, **ending)
    result = read_result(tmp_path)
    assert result is not None and render_summary(result) == (
        tmp_path / "summary.md"
    ).read_text(encoding="utf-8")
    assert (
        result.status is RunStatus.stopped
        and len(result.resumes) == resumes
        and len(result.prediction) > 2
    )
    tree = json.loads(
        (tmp_path / "result.json").read_text(), parse_constant=pytest.fail
    )
    assert tree["format_version"] == FORMAT_VERSION
    assert tree["steps"]["routing"]["z_loss"] == "inf" and tree["references_nats"] == {
        "uniform": 5.5,
        "none": "nan",
    }
    assert (
        tree["steps"]["memory_peak_gib"] == GPU_STEP.memory_peak_gib
        and tree["steps"]["eval_loss"] is None
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Record a run, and read its results as JSON."""
    folder = tmp_path_factory.mktemp("run")
    record(folder, sample=None)
    tree: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return tree


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"format_version": FORMAT_VERSION + 1},
            "its format_version is 2, and this version reads up to 1",
        ),
        ({"planned_steps": "4"}, "planned_steps is '4', not an integer"),
        ({"wall_seconds": "soon"}, "wall_seconds is 'soon', not"),
        ({"status": "well"}, r"status is 'well', not done \| stopped \| failed"),
        ({"steps": None}, "steps is null, not a mapping"),
        ({"resumes": [{"time": 1}]}, r"resumes\[0\].time is 1, not text"),
    ],
)
def test_invalid_file_is_reported_in_one_sentence(
    tmp_path: Path, recorded: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    """Oracle: the key and the value; a key of a later version is ignored."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(recorded | {"later": 1}))
    assert read_result(tmp_path) is not None
    path.write_text(json.dumps(recorded | changes))
    with pytest.raises(ForeignError, match=sentence):
        read_result(tmp_path)


def steps_of(count: int, on_gpu: bool = True) -> list[StepMetrics]:
    """Steps of 0.4 s and 8192 tokens at a quarter of the peak."""
    step = replace(
        STEP, step_time_seconds=0.4, valid_tokens=8192, tokens_per_second=8192 / 0.4
    )
    if on_gpu:
        step = replace(
            step,
            mfu=0.25,
            memory_allocated_gib=10.0,
            memory_peak_gib=19.0,
            memory_reserved_gib=20.0,
        )
    return [replace(step, step=number + 1) for number in range(count)]


DIFFERENCES = {
    "step time": (0.25, True),
    "tokens/s, all ranks": (-0.2, True),
    "MFU": (-0.2, True),
    "device memory after a step": (0.0, False),
    "peak device memory": (0.0526, False),
    "reserved device memory": (0.2, True),
}


@pytest.mark.parametrize(("on_gpu", "count"), [(True, 6), (False, 2)])
def test_differences_are_relative_to_the_measurement_and_flagged_above_10_percent(
    on_gpu: bool, count: int
) -> None:
    """Oracle: the differences worked by hand: 0.5 s against 0.4, 20 GiB against 19, 24 against 20;
    a CPU has two."""
    errors = prediction_errors(
        PREDICTION, summarize(steps_of(3, on_gpu), warmup_steps=1)
    )
    differences = {
        error.quantity: (round(error.difference, 4), error.flagged) for error in errors
    }
    assert differences == dict(list(DIFFERENCES.items())[:count])


@pytest.mark.parametrize(
    "memory_gib, warning", [(80, ""), (22, ", more than the 22.00 GiB available")]
)
def test_prediction_line_has_time_and_memory_and_reports_too_little_memory(
    memory_gib: float, warning: str
) -> None:
    """Oracle: the line, word for word."""
    assert prediction_line(PREDICTION, memory_gib * GIB) == (
        "predicted 500.0 ms per step, 16,384 tokens/s, 20.00 GiB peak, 24.00 GiB "
        f"reserved{warning} (estimated, plan.hardware=h100)"
    )
    line = (
        "predicted 500.0 ms per step, 16,384 tokens/s (estimated, plan.hardware=h100)"
    )
    assert prediction_line(replace(PREDICTION, device_type="cpu"), 0) == line


def test_summary_compares_prediction_and_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the table's rows, the files in the folder, which the result lists, and the last lines
    on the console."""
    config = MetricsConfig(
        run_dir=str(tmp_path / "run"), console=Console.plain, warmup_steps=0
    )
    with RunRecorder(
        config, "t", {}, ENVIRONMENT, 2, {}, prediction=PREDICTION
    ) as recorder:
        for step in steps_of(2):
            recorder.step(step)
        recorder.finish("all steps done")
    page = (tmp_path / "run/summary.md").read_text()
    assert "| step time | 500.00 ms | 400.00 ms | **+25.0%**, over 10% |" in page
    assert "| device memory after a step | 10.00 GiB | 10.00 GiB | +0.0% |" in page
    listed = json.loads((tmp_path / "run/result.json").read_text())["files"]
    assert "prediction.json" in listed and listed.keys() == {
        path.name for path in (tmp_path / "run").iterdir()
    }
    prediction_tree = json.loads((tmp_path / "run/prediction.json").read_text())
    assert (
        prediction_tree["memory"]["categories"] == {"parameters": 4 * GIB}
        and prediction_tree["tokens_per_second"] == 16384
    )
    assert (
        "predicted step time differs by +25% from the measurement"
        in capsys.readouterr().out
    )
