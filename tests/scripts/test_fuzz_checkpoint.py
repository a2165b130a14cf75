"""The script that damages checkpoints."""

import os
import random
import signal
from pathlib import Path

import pytest

from fsdptoys.checkpoint import Schema
from fsdptoys.checkpoint import load as reading
from scripts import fuzz_checkpoint, fuzz_edits
from scripts.fuzz_checkpoint import DAMAGES, fuzz, main
from scripts.fuzz_edits import EDITS, edits

pytestmark = pytest.mark.extended


def test_all_damage_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the saved values; all kinds of damage alternate."""
    assert main(["--damages", "60", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*DAMAGES, *EDITS, "all"]
    assert all(line.startswith(f"| {kind} | 3 |") for kind, line in zip([*DAMAGES, *EDITS], lines[2:], strict=False))
    # Most of them damage the newest checkpoint permanently.
    detected = int(lines[-1].split("|")[3])
    assert 30 <= detected <= 57


def test_undetected_damage_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a reader that checks sizes only."""
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    monkeypatch.setattr(fuzz_checkpoint, "EDITS", {})
    counts = fuzz(4 * len(DAMAGES), seed=0)
    assert sum(of_kind["missed"] for of_kind in counts.values()) > 2
    assert "missed: " in capsys.readouterr().out


def test_tracebacks_and_dead_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a reader without validation of facts, such as numpy's position; and a process that kills itself."""
    monkeypatch.setattr(fuzz_edits, "FACTS", Schema())
    outcomes = [outcome for _, outcome, _ in edits(["edited state", "edited rank"] * 30, seed=0)]
    assert len(outcomes) == 60 and outcomes.count("missed") > 4

    def die(folder: Path, draw: random.Random) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setitem(EDITS, "edited rank", die)
    found = list(edits(["edited rank", "edited index", "edited rank"], seed=0))
    missed = [(kind, why) for kind, outcome, why in found if outcome == "missed"]
    assert missed == [("edited rank", "the process died")] * 2
