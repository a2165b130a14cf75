"""The benchmark of the memory switches: measured rows, and missed targets."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.utils.dtensor import local_tensor
from scripts import bench_memory
from scripts.bench_memory import ROWS, MeasuredRows, Result, judge
from scripts.ranks import run_ranks


@pytest.mark.extended
def test_rows_run_on_the_cpu_or_give_their_reason(tmp_path: Path) -> None:
    """Oracle: the table of the real command; a CPU cannot run one of its rows."""
    page = tmp_path / "table.md"
    words = ["--device=cpu", "--model=llama_debug", "--seq-len=32", "--steps=3", "--warmup-steps=1"]
    words += ["--strategies", "fsdp1", "fsdp2", "--rows", "gc chunk co", "--write", str(page)]
    subprocess.run([sys.executable, bench_memory.__file__, *words], check=True, capture_output=True)
    first, second = (line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| fsdp"))
    assert first[:2] == ["| fsdp1", "gc chunk co"]
    assert first[2].startswith("not run: memory.cpu_offload=true needs an accelerator")
    assert second[:2] == ["| fsdp2", "gc chunk co"]
    assert float(second[2]) > 0


@pytest.mark.parametrize("classic", [False, True])
def test_verdicts_follow_from_ratios_of_one_run(classic: bool) -> None:
    """Oracle: verdicts by hand; published memory counts for the model of the published table alone."""
    measured = {
        "gc": Result(2.0, 9.72, 15.0, 18.0),
        "gc chunk": Result(2.0, 9.6, 14.0, 17.0),
        "gc chunk oo": Result(2.3, 3.2, 9.0, 13.0),
        "gc chunk co": Result(2.9, 0.05, 5.0, 8.0),
        "gc chunk co overlapped": Result(failure="OutOfMemoryError"),
    }
    verdicts = judge({("fsdp2", name): result for name, result in measured.items()}, classic)
    missed = [verdict for verdict in verdicts if verdict.startswith("missed")]
    expected = ["missed: fsdp2 gc chunk co overlapped failed: OutOfMemoryError"]
    expected += ["missed: fsdp2 gc chunk oo takes 1.15 times as long as gc chunk, bar 1.1"]
    expected += ["missed: fsdp2 gc chunk: 9.60 GiB allocated at the end, published 9.48"] * classic
    assert missed == expected
    assert len(verdicts) == (13 if classic else 4)


def test_base_of_every_row_exists() -> None:
    """Oracle: the names of the rows."""
    assert all(row.base is None or row.base in ROWS for row in ROWS.values())


ARGS = argparse.Namespace(
    device="cpu", model="llama_debug", world_size=8, seq_len=16, steps=2, warmup_steps=1, cores=1,
    one=("fsdp2", "plain"), write=None, resume=True, seconds=None, row_seconds=60.0,
)  # fmt: skip


def measure_with(value: float) -> Result:
    """A row whose parameters begin with this value."""
    bench_memory.fill = lambda param, name: local_tensor(param).fill_(value)
    return bench_memory.measure(ARGS)


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_row_fails_if_an_update_was_skipped(value: float) -> None:
    """Oracle: parameters of NaN, whose gradients the fake collectives turn to zeros but whose loss is NaN."""
    result = run_ranks(1, measure_with, value)[0]
    skipped = result.failure == "an update was skipped: a loss or gradient was not finite"
    assert skipped == (value != value) and (result.seconds is None) == skipped


def test_later_call_measures_only_the_rows_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the rows that each call measures; other settings are refused."""
    measured: list[str] = []

    def run_row(args: argparse.Namespace, strategy: str, name: str, seconds: float) -> Result:
        measured.append(name)
        return Result(failure=bench_memory.too_long(seconds)) if name == "gc" and seconds < 60 else Result(1.0, 2.0)

    monkeypatch.setattr(bench_memory, "run_row", run_row)
    for seconds, left in ((30.0, 1), (None, 0)):
        rows = MeasuredRows(argparse.Namespace(**{**vars(ARGS), "write": tmp_path / "page.md", "seconds": seconds}))
        found = [rows.row("fsdp2", name) for name in ("plain", "gc")]
        assert rows.left == left and found[0] == Result(1.0, 2.0)
    assert measured == ["plain", "gc", "gc"]
    with pytest.raises(SystemExit, match="was measured with seq_len=16"):
        MeasuredRows(argparse.Namespace(**{**vars(ARGS), "write": tmp_path / "page.md", "seq_len": 32}))
