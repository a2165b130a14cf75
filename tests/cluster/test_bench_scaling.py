"""The scaling benchmark's numbers."""

from pathlib import Path

import pytest

from fsdptoys.metrics.prediction import Volume
from scripts import bench_scaling


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.extended
@pytest.mark.usefixtures("unmeasured", "warm")
def test_script_lists_every_world_size_in_its_three_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the requested worlds, costs above nothing, counts that do not grow, and the planner's own table
    of a rank's bytes; the file equals the output."""
    words = ["--ranks", "2", "--steps", "7", "--counted", "16", "1024", "--planned", "8", "--model", "llama3_1b"]
    assert bench_scaling.main([*words, "--write", str(tmp_path / "scaling.md")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "scaling.md").read_text() == text
    assert " ".join(words) in text
    rows = [cells(line) for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [row[0] for row in rows] == ["2", "16", "1,024", "8"]
    assert all(float(part) > 0 for cell in rows[0][1:] for part in cell.split(" / "))
    assert rows[1][1:4] == rows[2][1:4] and float(rows[1][4]) < float(rows[2][4])
    assert rows[3][1] == "`node`" and float(rows[3][2]) < float(rows[3][3])


def test_message_counts_follow_the_ring_algorithms() -> None:
    """Oracle: computed by hand: a gather of 8 takes 7 of each rank, an all-reduce of 4 twice 3."""
    volumes = (Volume("all_gather", "shard", 8, 10, 1, 1.0), Volume("all_reduce", "replicate", 4, 2, 1, 1.0))
    assert bench_scaling.messages(volumes) == 10 * 7 + 2 * 2 * 3
