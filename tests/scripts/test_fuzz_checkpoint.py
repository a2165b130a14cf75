"""The script that damages checkpoints."""

import pytest

from fsdptoys.checkpoint import load as reading
from scripts import fuzz_checkpoint
from scripts.fuzz_checkpoint import DAMAGES, fuzz, main
from scripts.fuzz_edits import EDITS

pytestmark = pytest.mark.extended


def test_all_damage_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the saved values; all kinds of damage alternate."""
    assert main(["--damages", "60", "--seed", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [*DAMAGES, *EDITS, "all"]
    # Most of them damage the newest checkpoint permanently.
    assert 30 <= int(rows[-1].split("|")[3]) <= 57


def test_undetected_damage_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a reader that checks sizes only."""
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    monkeypatch.setattr(fuzz_checkpoint, "EDITS", {})
    counts = fuzz(4 * len(DAMAGES), seed=0)
    assert sum(of_kind["missed"] for of_kind in counts.values()) > 2
    assert "missed: " in capsys.readouterr().out
