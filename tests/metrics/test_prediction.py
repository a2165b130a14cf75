"""Predictions compared with measurements."""

import dataclasses
import json
from pathlib import Path

import pytest

from fsdptoys.device import Device
from fsdptoys.metrics import MetricsConfig, RunRecorder, StepMetrics, environment
from fsdptoys.metrics.config import Console
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    Prediction,
    TimePrediction,
    prediction_line,
)
from fsdptoys.metrics.results import prediction_errors, summarize

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


def step(number: int, seconds: float, reserved: float | None) -> StepMetrics:
    """A step of 8192 tokens at a tenth of the peak or less."""
    return StepMetrics(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        step_time_seconds=seconds,
        valid_tokens=8192,
        tokens_per_second=8192 / seconds,
        tflops_per_second_per_rank=1.0,
        mfu=0.1 / seconds if reserved else None,
        memory_allocated_gib=reserved and 10.0,
        memory_peak_gib=reserved and 19.0,
        memory_reserved_gib=reserved,
        resident_set_gib=1.0,
        resident_set_peak_gib=1.5,
    )


def test_differences_are_relative_to_the_measurement_and_flagged_above_10_percent() -> None:
    """Oracle: the differences worked by hand: 0.5 s against 0.4, 20 GiB against 19, 24 against 20."""
    found = prediction_errors(PREDICTION, summarize([step(number, 0.4, 20.0) for number in (1, 2, 3)], warmup_steps=1))
    assert {each.quantity: (round(each.difference, 4), each.flagged) for each in found} == {
        "step time": (0.25, True),
        "tokens/s, all ranks": (-0.2, True),
        "MFU": (-0.2, True),
        "device memory after a step": (0.0, False),
        "peak device memory": (0.0526, False),
        "reserved device memory": (0.2, True),
    }


def test_cpu_run_has_no_device_memory_to_compare() -> None:
    """Oracle: the remaining quantities."""
    found = prediction_errors(PREDICTION, summarize([step(number, 0.4, None) for number in (1, 2, 3)], warmup_steps=1))
    assert [each.quantity for each in found] == ["step time", "tokens/s, all ranks"]


@pytest.mark.parametrize("memory_gib, warning", [(80, ""), (22, ", more than the 22.00 GiB available")])
def test_prediction_line_has_time_and_memory_and_reports_too_little_memory(memory_gib: float, warning: str) -> None:
    """Oracle: the line, word for word."""
    assert prediction_line(PREDICTION, memory_gib * GIB) == (
        f"predicted 500.0 ms per step, 16,384 tokens/s, 20.00 GiB peak, 24.00 GiB reserved{warning} "
        "(closed form, plan.hardware=h100)"
    )
    on_cpu = dataclasses.replace(PREDICTION, device_type="cpu")
    assert prediction_line(on_cpu, 0) == (
        "predicted 500.0 ms per step, 16,384 tokens/s (closed form, plan.hardware=h100)"
    )


def test_summary_compares_prediction_and_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the table's rows, the file that the page names, and the last lines on the console."""
    config = MetricsConfig(run_dir=str(tmp_path / "run"), console=Console.plain, warmup_steps=0)
    where = environment(Device("cpu"), 8, ["train"])
    with RunRecorder(config, "t", {}, where, 2, {}, prediction=PREDICTION) as recorder:
        recorder.step(step(1, 0.4, 24.0))
        recorder.step(step(2, 0.4, 24.0))
        recorder.finish("all steps done")
    page = (tmp_path / "run/summary.md").read_text()
    assert "| step time | 500.00 ms | 400.00 ms | **+25.0%**, over 10% |" in page
    assert "| reserved device memory | 24.00 GiB | 24.00 GiB | +0.0% |" in page
    assert "`prediction.json`" in page
    written = json.loads((tmp_path / "run/prediction.json").read_text())
    assert written["memory"]["categories"] == {"parameters": 4 * GIB} and written["tokens_per_second"] == 16384
    assert "predicted step time differs by +25% from the measurement" in capsys.readouterr().out
