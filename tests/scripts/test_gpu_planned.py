"""Peaks that the checks of a device have measured, beside those that are planned."""

import json
from pathlib import Path

import pytest

from scripts import gpu_planned


@pytest.mark.extended
def test_page_has_the_error_of_each_measured_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the error by hand, of a row whose measured peak is twice the planned one, and of no row without one."""
    monkeypatch.setattr(gpu_planned, "SMALL", ["model=llama_debug", "train.batch_size=1", "train.seq_len=16"])
    line = {"check": "memory", "device": "cuda", "facts": {"machine": "one H200"}}
    (planned,) = gpu_planned.compare([line | {"facts": {"plain": {"peak_gib": 1.0}}}], "h200")
    facts = {"machine": "one H200", "plain": {"peak_gib": 2 * planned.peak_gib}, "chunk_loss: failed": "a reason"}
    (tmp_path / "smoke.jsonl").write_text(json.dumps(line | {"facts": facts}) + "\n")
    page = tmp_path / "page.md"
    words = ["gpu_planned.py", str(tmp_path / "smoke.jsonl"), "--hardware", "h200", "--write", str(page)]
    monkeypatch.setattr("sys.argv", words)
    gpu_planned.main()
    (row,) = [text for text in page.read_text().splitlines() if text.startswith("| memory")]
    assert row.startswith("| memory | plain |") and row.endswith("| -50.00% |") and "one H200" in page.read_text()
