"""The benchmark on one GPU: targets, rows without figures, planned memory, and a trial."""

import json
import sys
from pathlib import Path

import pytest

from fsdptoys.device.profile import load_hardware
from scripts import bench_gpu
from scripts.bench_gpu import SHAPES, Bench, planned_memory, why
from scripts.gpu_page import ACCELERATE, BARE, COMPILED, EAGER, FLOAT8, Row, Shape, judge
from scripts.peers.measure import Measured, Run, take_within
from tests.scripts.test_bench_peers import WAITING

SHAPE = SHAPES[0]


def rows(**speeds: float | None) -> list[Row]:
    """Rows that meet every target except for the changes; a speed of 1000 is 51% of the peak."""
    names = {"compiled": COMPILED, "bare": BARE, "float8": FLOAT8, "eager": EAGER, "accelerate": ACCELERATE}
    usual = {"compiled": 1000.0, "bare": 900.0, "float8": 1300.0, "eager": 700.0, "accelerate": 600.0}
    return [
        Row(SHAPE.name, names[name], "", failure="out of memory")
        if speed is None
        else Row(SHAPE.name, names[name], "", speed, speed * 0.51e-3, first_loss=12.0, last_loss=11.0)
        for name, speed in {**usual, **speeds}.items()
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"compiled": 970.0}, ["missed: llama3_8b-8192 compiled has 49.5% MFU, target 50%"]),
        ({"float8": 1200.0}, ["missed: llama3_8b-8192 float8 has 1.20 of bf16's tokens/s, target 1.25"]),
        ({"accelerate": 1250.0}, ["missed: llama3_8b-8192 compiled has 0.80 of the tokens/s of accelerate"]),
        ({"bare": None, "accelerate": None}, ["not measured: llama3_8b-8192 against a peer"]),
        ({"float8": None}, ["not measured: llama3_8b-8192 float8"]),
        ({"compiled": None}, ["not measured: llama3_8b-8192 FSDPToys, compiled: out of memory"]),
    ],
)
def test_verdicts_are_met_missed_or_not_measured(changes: dict[str, float | None], expected: list[str]) -> None:
    """Oracle: verdicts by hand."""
    verdicts = judge(rows(**changes), [SHAPE])
    found = [line for line in verdicts if not line.startswith("met")]
    assert [line[: len(words)] for line, words in zip(found, expected, strict=True)] == expected


def test_different_first_loss_is_reported() -> None:
    """Oracle: a loss 10% off."""
    odd = rows()
    odd[1] = Row(**{**vars(odd[1]), "first_loss": 10.8})
    assert [line for line in judge(odd, [SHAPE]) if "begins with the loss 10.800" in line]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("status 1 after 0\ntorch.OutOfMemoryError: CUDA out of memory. Tried to", "out of memory"),
        ("status -9 after 0 of 8 steps\nkilled after 90 s", "no end within its time, 0 of 8 steps done"),
        ("status 1\nModuleNotFoundError: No module named 'accelerate'", "unsupported: accelerate is not installed"),
        ("status 1\nfsdptoys.errors.ConfigError: a=1 is odd; set a=2\n", "unsupported: a=1 is odd; set a=2"),
        ("status 1\nValueError: no", "failed: ValueError: no"),
    ],
)
def test_failed_row_gives_its_reason(failure: str, said: str) -> None:
    """Oracle: messages of PyTorch and Python."""
    assert why(Measured(failure=failure)) == said


def test_row_predicted_to_exceed_device_memory_is_left_out(tmp_path: Path) -> None:
    """Oracle: the expected message, for our rows only; the planner does not predict peers."""
    bench = Bench("cuda", tmp_path, sys.executable, 989e12, 79.6, 0.0)
    for planned, reason in ((93.7, "left out: 94 GiB are planned, and the device has 80"), (79.0, "the call's time")):
        assert reason in str(bench.run(SHAPE, COMPILED, 1e9, planned).failure)
    assert "the call's time" in str(bench.run(SHAPE, BARE, 1e9, 93.7).failure)


TRAINER = """
for step in range(1, 5):
    time.sleep(0.05)
    print(f"step {step}/4 loss {1 / step}", flush=True)
print("note continued", continued)
"""


@pytest.mark.parametrize("stops", [True, False])
def test_run_without_turns_is_never_stopped(stops: bool, tmp_path: Path) -> None:
    """Oracle: signals counted by the run; steps, losses and note are recorded in both cases."""
    run = Run([sys.executable, "-c", WAITING + TRAINER], {}, tmp_path, 4, 300.0, stops=stops)
    take_within(run, 300.0)
    result = run.result
    assert result.failure is None and result.losses == [1.0, 0.5, pytest.approx(1 / 3), 0.25]
    assert len(result.seconds) == 4 and min(result.seconds) > 0
    assert (result.note == "continued 0") == (not stops)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_eager_rows_are_predicted_to_fit_one_h200(shape: Shape, tmp_path: Path) -> None:
    """Oracle: the planner's closed form, for the settings of the eager row, which keeps the most."""
    tokens = tmp_path / shape.name / "tokens.bin"
    tokens.parent.mkdir()
    tokens.write_bytes(bytes(4 * 2**18))
    bench = Bench("cuda", tmp_path, sys.executable, 989e12, None, 90.0)
    needed = planned_memory(bench.words(shape, EAGER), "cuda")
    assert needed is not None and 16.0 * 2**30 < needed.peak_bytes <= needed.reserved_bytes
    assert needed.reserved_bytes < 0.95 * load_hardware("h200").usable_bytes


@pytest.mark.extended
def test_cpu_trial_writes_rows_and_reports_failed_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the environment: no accelerate for an interpreter without packages, no time for the last."""
    words = ["--device", "cpu", "--tiny", "--write", str(tmp_path / "gpu"), "--contestants", EAGER, "accel"]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *words])
    monkeypatch.setitem(bench_gpu.CONTESTANTS, ACCELERATE, "no_such_peer.py")
    assert bench_gpu.main() == 0
    page, tree = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert capsys.readouterr().out.strip() == page.strip()
    ours, theirs = tree["rows"].values()
    assert ours["tokens_per_second"] > 0 and ours["failure"] is None and ours["mfu"] is None
    assert 5.0 < ours["first_loss"] < 6.0  # log 256 is 5.55
    assert theirs["tokens_per_second"] is None and theirs["failure"].startswith("failed: ")
    assert f"| {ACCELERATE} | failed: " in page and "nothing is held against them" in page
