"""The benchmark of the planner against a device: its tolerances can be missed."""

import dataclasses

from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import MemoryPrediction, Prediction, TimePrediction
from scripts.bench_memory import Result
from scripts.bench_plan import Compared, judge

MEASURED = Result(seconds=2.0, end_gib=9.72, peak_gib=15.0, reserved_gib=18.0)


def prediction(seconds: float, end: float, peak: float, reserved: float) -> Prediction:
    """Prediction of one row."""
    memory = MemoryPrediction(round(end * GIB), round(peak * GIB), round(reserved * GIB), "backward")
    time = TimePrediction(seconds, seconds, 0.0, 0.0, 0.0)
    return Prediction("traced", "h100", 8, 1, 1.0, None, memory, time)


def test_verdicts_compare_each_prediction_with_its_tolerance() -> None:
    """Oracle: the bars of the page, worked by hand: 0.01 GiB, 2%, 5%, 20% and 8%."""
    near = Compared(MEASURED, prediction(2.39, 9.725, 15.29, 18.8), prediction(2.15, 9.725, 15.29, 18.8), True)
    assert [verdict.split(":")[0] for verdict in judge({("fsdp2", "gc"): near})] == ["met"] * 5
    far = Compared(MEASURED, prediction(2.41, 9.74, 15.31, 19.0), prediction(2.17, 9.74, 15.31, 19.0), True)
    assert [verdict.split(":")[0] for verdict in judge({("fsdp2", "gc"): far})] == ["missed"] * 5
    offload = dataclasses.replace(far, on_device=False)
    assert len(judge({("fsdp2", "gc chunk oo"): offload})) == 3
