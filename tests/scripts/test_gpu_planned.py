"""Peaks that the checks of a device have measured, beside those that are planned."""

import json
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from scripts import gpu_planned
from scripts.smoke.runs import COMMON


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


def test_compared_rows_are_valid_on_cuda() -> None:
    """Oracle: the configuration's own checks, and more than thirty rows."""
    rows = {
        (check, name): words
        for check in ("memory", "compile", "float8", "optimizers", "adapters", "speed")
        for name, words in gpu_planned.words_of(check).items()
    }
    assert len(rows) > 30 and not gpu_planned.words_of("attention")
    for (check, name), words in rows.items():
        if check == "float8" or name in ("8-bit", "4-bit"):
            pytest.importorskip("torchao")
        compose_config([*COMMON, "launch.device=cuda", *words]).validate(1, "cuda")
