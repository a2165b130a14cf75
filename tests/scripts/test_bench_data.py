"""The data benchmark: measured rows, and missed targets."""

from pathlib import Path

import pytest

from fsdptoys.data import PreparedConfig
from scripts import bench_data

TINY = ["--tokens", "64000", "--shards", "2", "--seq-lens", "64", "--seconds", "0.01", "--repeats", "1", "--files", "3"]
TINY += ["--vocab-size", "300", "--processes", "1", "--steps", "0"]


@pytest.mark.parametrize(("bar", "status"), [(0.0, 0), (1e15, 1)])
def test_page_lists_every_row_and_exit_status_follows_the_target(bar, status, tmp_path: Path, monkeypatch) -> None:
    """Oracle: counts of rows by kind, and bars always or never reached."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(bench_data, "BAR", bar)
    assert bench_data.main([*TINY, "--write", str(tmp_path / "data.md")]) == status
    page = (tmp_path / "data.md").read_text()
    assert page.count("| 64 | ") == 5 and page.count("| 1 | ") == 2 and page.count("MISSED") == status


def test_read_rate_is_tokens_over_elapsed_seconds(tmp_path: Path, monkeypatch) -> None:
    """Oracle: a clock that advances one second per read: an interval of 4.5 has 4 batches of 8 rows, in 5 seconds."""
    folder = bench_data.write_shards(tmp_path / "out", 64_000, 1, wide=True)
    seconds = iter(range(1000))
    monkeypatch.setattr(bench_data.time, "process_time", lambda: next(seconds))
    assert bench_data.read_rate(PreparedConfig(folder=folder), 64, 4.5, 2) == 4 * 8 * 64 / 5
