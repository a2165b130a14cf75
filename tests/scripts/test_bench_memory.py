"""The benchmark of the memory switches: measured rows, and missed targets."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_memory import ROWS, Result, judge

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("unmeasured")
def test_rows_run_on_the_cpu_or_give_their_reason(tmp_path: Path) -> None:
    """Oracle: the table of the real command; a CPU cannot run one of its rows."""
    page = tmp_path / "table.md"
    words = ["--device=cpu", "--model=llama_debug", "--seq-len=32", "--steps=3", "--warmup-steps=1"]
    words += ["--strategies", "fsdp1", "fsdp2"]
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "bench_memory.py",
            *words,
            "--rows",
            "gc chunk co",
            "--write",
            page,
        ],
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0
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
