"""The script that damages checkpoints."""

import pytest

from fsdptoys.checkpoint import reading
from scripts.fuzz_checkpoint import DAMAGES, fuzz, main


@pytest.mark.usefixtures("unmeasured")
def test_no_damage_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the values that were saved; every kind of damage has its turns."""
    assert main(["--damages", "45", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*DAMAGES, "all"]
    assert all(line.startswith(f"| {kind} | 3 |") for kind, line in zip(DAMAGES, lines[2:], strict=False))
    # The newest is damaged for good by most of them.
    detected = int(lines[-1].split("|")[3])
    assert 30 <= detected <= 42


@pytest.mark.usefixtures("unmeasured")
def test_the_script_notices_what_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a reader that trusts sizes alone."""
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    counts = fuzz(4 * len(DAMAGES), seed=0)
    assert sum(of_kind["missed"] for of_kind in counts.values()) > 2
    assert "missed: " in capsys.readouterr().out
