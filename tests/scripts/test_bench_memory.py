"""The benchmark of the memory switches: measured rows, and missed targets."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.utils.dtensor import local_tensor
from scripts import bench_memory
from scripts.bench_memory import Result, judge
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


def test_verdicts_follow_from_ratios_and_published_memory() -> None:
    """Oracle: verdicts by hand."""
    measured = {
        "gc": Result(2.0, 9.72, 15.0, 18.0),
        "gc chunk": Result(2.0, 9.6, 14.0, 17.0),
        "gc chunk oo": Result(2.3, 3.2, 9.0, 13.0),
        "gc chunk co": Result(2.9, 0.05, 5.0, 8.0),
        "gc chunk co overlapped": Result(failure="OutOfMemoryError"),
    }
    verdicts = judge({("fsdp2", name): result for name, result in measured.items()}, True)
    assert len(verdicts) == 13
    assert [verdict for verdict in verdicts if verdict.startswith("missed")] == [
        "missed: fsdp2 gc chunk co overlapped failed: OutOfMemoryError",
        "missed: fsdp2 gc chunk oo takes 1.15 times as long as gc chunk, bar 1.1",
        "missed: fsdp2 gc chunk: 9.60 GiB allocated at the end, published 9.48",
    ]


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
