"""Predictions compared with measurements."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.metrics import MetricsConfig, RunRecorder, StepMetrics
from fsdptoys.metrics.config import Console
from fsdptoys.metrics.prediction import Category, MemoryPrediction, Prediction, TimePrediction, prediction_line
from fsdptoys.metrics.results import prediction_errors, summarize
from tests.metrics.recording import ENVIRONMENT, STEP

GIB = 2**30

PREDICTION = Prediction(
    method="closed form",
    hardware="h100",
    world_size=8,
    tokens_per_step=8192,
    model_flops_per_step=1e14,
    peak_flops=1e15,
    memory=MemoryPrediction(10 * GIB, 20 * GIB, 24 * GIB, "backward", {Category.parameters: 4 * GIB}),
    time=TimePrediction(0.5, 0.4, 0.05, 0.0, 0.05),
)


def steps_of(count: int, on_gpu: bool = True) -> list[StepMetrics]:
    """Steps of 0.4 s and 8192 tokens at a quarter of the peak."""
    step = replace(STEP, step_time_seconds=0.4, valid_tokens=8192, tokens_per_second=8192 / 0.4)
    if on_gpu:
        step = replace(step, mfu=0.25, memory_allocated_gib=10.0, memory_peak_gib=19.0, memory_reserved_gib=20.0)
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
def test_differences_are_relative_to_the_measurement_and_flagged_above_10_percent(on_gpu: bool, count: int) -> None:
    """Oracle: the differences worked by hand: 0.5 s against 0.4, 20 GiB against 19, 24 against 20; a CPU has two."""
    found = prediction_errors(PREDICTION, summarize(steps_of(3, on_gpu), warmup_steps=1))
    differences = {error.quantity: (round(error.difference, 4), error.flagged) for error in found}
    assert differences == dict(list(DIFFERENCES.items())[:count])


@pytest.mark.parametrize("memory_gib, warning", [(80, ""), (22, ", more than the 22.00 GiB available")])
def test_prediction_line_has_time_and_memory_and_reports_too_little_memory(memory_gib: float, warning: str) -> None:
    """Oracle: the line, word for word."""
    assert prediction_line(PREDICTION, memory_gib * GIB) == (
        f"predicted 500.0 ms per step, 16,384 tokens/s, 20.00 GiB peak, 24.00 GiB reserved{warning} "
        "(closed form, plan.hardware=h100)"
    )
    line = "predicted 500.0 ms per step, 16,384 tokens/s (closed form, plan.hardware=h100)"
    assert prediction_line(replace(PREDICTION, device_type="cpu"), 0) == line


def test_summary_compares_prediction_and_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the table's rows, the file that the page names, and the last lines on the console."""
    config = MetricsConfig(run_dir=str(tmp_path / "run"), console=Console.plain, warmup_steps=0)
    with RunRecorder(config, "t", {}, ENVIRONMENT, 2, {}, prediction=PREDICTION) as recorder:
        for step in steps_of(2):
            recorder.step(step)
        recorder.finish("all steps done")
    page = (tmp_path / "run/summary.md").read_text()
    assert "| step time | 500.00 ms | 400.00 ms | **+25.0%**, over 10% |" in page
    assert "| device memory after a step | 10.00 GiB | 10.00 GiB | +0.0% |" in page
    assert "`prediction.json`" in page
    written = json.loads((tmp_path / "run/prediction.json").read_text())
    assert written["memory"]["categories"] == {"parameters": 4 * GIB} and written["tokens_per_second"] == 16384
    assert "predicted step time differs by +25% from the measurement" in capsys.readouterr().out
