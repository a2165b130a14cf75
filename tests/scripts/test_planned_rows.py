"""Predicted rows of today's trainer on one H200: their settings, and the cells of the table."""

from types import SimpleNamespace
from typing import Any, cast

from fsdptoys.metrics.prediction import TimePrediction
from fsdptoys.plan.simulator.events import KernelKind
from scripts.planned_rows import PlannedRow, planned_config, planned_table

GIB = 2**30


def test_table_shows_speed_and_parts_of_the_step() -> None:
    """Oracle: 16,384 tokens in half a second; FLOPs of the 1B model by 6 a weight and token and attention's."""
    kinds = {KernelKind.matmul.value: 0.3, KernelKind.attention.value: 0.1, KernelKind.memory.value: 0.05}
    time = TimePrediction(0.5, 0.45, 0.01, 0.02, 0.02, kinds)
    memory = SimpleNamespace(peak_bytes=40 * GIB, reserved_bytes=41 * GIB)
    replay = cast(Any, SimpleNamespace(time=lambda: time, memory=lambda: memory))
    name = "h200 1B 4x4096"
    line = planned_table([PlannedRow(name, planned_config(name), replay)])[2]
    weights, attention = 1_235_814_400 - 2048 * 33, 6 * 16 * 2048 * 4096
    mfu = (6 * weights + attention) * 16384 / 0.5 / 989.4e12
    expected = f"| 1B 4x4096 | 500.0 | 32,768 | {mfu:.1%} | 40.0 | 41.0 | 300.0 | 100.0 | 50.0 | 30.0 | 20.0 |"
    assert line == expected
