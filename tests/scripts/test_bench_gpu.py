"""The benchmark on one GPU: targets, rows without figures, and a trial."""

import json
import sys
from pathlib import Path

import pytest

from scripts import bench_gpu
from scripts.bench_gpu import SHAPES, why
from scripts.gpu_page import ACCELERATE, BARE, COMPILED, EAGER, FLOAT8, Row, judge
from scripts.peers.measure import Measured

SHAPE = SHAPES[0]
SPEEDS: dict[str, float | None] = {COMPILED: 1000.0, BARE: 900.0, FLOAT8: 1300.0, EAGER: 700.0, ACCELERATE: 600.0}
"""Tokens per second that meet every target; 1000 is 51% of the peak."""


def row_of(contestant: str, speed: float | None) -> Row:
    """A row with this speed, or one that ran out of memory."""
    if speed is None:
        return Row(SHAPE.name, contestant, "", failure="out of memory")
    return Row(SHAPE.name, contestant, "", speed, speed * 0.51e-3, first_loss=12.0, last_loss=11.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({COMPILED: 970.0}, ["missed: llama3_8b-8192 compiled has 49.5% MFU, target 50%"]),
        ({FLOAT8: 1200.0}, ["missed: llama3_8b-8192 float8 has 1.20 of bf16's tokens/s, target 1.25"]),
        ({ACCELERATE: 1250.0}, ["missed: llama3_8b-8192 compiled has 0.80 of the tokens/s of accelerate"]),
        ({BARE: None, ACCELERATE: None}, ["not measured: llama3_8b-8192 against a peer"]),
        ({COMPILED: None}, ["not measured: llama3_8b-8192 FSDPToys, compiled: out of memory"]),
    ],
)
def test_verdicts_are_met_missed_or_not_measured(changes: dict[str, float | None], expected: list[str]) -> None:
    """Oracle: verdicts by hand."""
    verdicts = judge([row_of(name, speed) for name, speed in {**SPEEDS, **changes}.items()], [SHAPE])
    found = [line for line in verdicts if not line.startswith("met")]
    assert [line[: len(words)] for line, words in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("status 1 after 0\ntorch.OutOfMemoryError: CUDA out of memory. Tried to", "out of memory"),
        ("status -9 after 0 of 8 steps\nkilled after 90 s", "no end within its time, 0 of 8 steps done"),
        ("status 1\nModuleNotFoundError: No module named 'accelerate'", "unsupported: accelerate is not installed"),
        ("status 1\nValueError: no", "failed: ValueError: no"),
    ],
)
def test_failed_row_gives_its_reason(failure: str, reason: str) -> None:
    """Oracle: messages of PyTorch and Python."""
    assert why(Measured(failure=failure)) == reason


@pytest.mark.extended
def test_cpu_trial_writes_rows_and_reports_failed_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a peer without a script."""
    words = ["--device", "cpu", "--tiny", "--write", str(tmp_path / "gpu"), "--contestants", EAGER, "accel"]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *words])
    monkeypatch.setitem(bench_gpu.CONTESTANTS, ACCELERATE, "no_such_peer.py")
    assert bench_gpu.main() == 0
    ours, theirs = json.loads((tmp_path / "gpu.json").read_text())["rows"].values()
    assert ours["tokens_per_second"] > 0 and ours["failure"] is None
    assert 5.0 < ours["first_loss"] < 6.0  # log 256 is 5.55
    assert theirs["tokens_per_second"] is None and theirs["failure"].startswith("failed: ")
    assert f"| {ACCELERATE} | failed: " in (tmp_path / "gpu.md").read_text()
