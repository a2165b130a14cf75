"""Fuzzers of checkpoints and readers: nothing fails, and they detect what does."""

import os
from pathlib import Path

import pytest

from fsdptoys.checkpoint import load as reading
from scripts.fuzz import fuzz_checkpoint, fuzz_readers
from scripts.fuzz.fuzz_checkpoint import DAMAGES
from scripts.fuzz.fuzz_edits import EDITS
from scripts.fuzz.fuzz_readers import run_cases
from scripts.fuzz.fuzz_targets import READERS, Reader


@pytest.mark.extended
def test_all_damage_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the saved values; all kinds of damage alternate."""
    assert fuzz_checkpoint.main(["--damages", "60", "--seed", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [*DAMAGES, *EDITS, "all"]
    # Most of them damage the newest checkpoint permanently.
    assert 30 <= int(rows[-1].split("|")[3]) <= 57


@pytest.mark.extended
def test_undetected_damage_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a reader that checks sizes only."""
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    monkeypatch.setattr(fuzz_checkpoint, "EDITS", {})
    counts = fuzz_checkpoint.fuzz(4 * len(DAMAGES), seed=0)
    assert sum(of_kind["missed"] for of_kind in counts.values()) > 2
    assert "missed: " in capsys.readouterr().out


@pytest.mark.extended
def test_mutated_files_cause_no_traceback() -> None:
    """Oracle: every reader's own errors; a full run of the fuzzer."""
    done, failed = fuzz_readers.fuzz(2000, seed=0, progress=False)
    assert set(done) == set(READERS)
    assert not failed, "\n".join(
        f"{result.case} {result.mutation}: {result.failure}" for result in failed
    )


def raises(copy: Path) -> None:
    raise KeyError("x")


def spins(copy: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "failure"),
    [
        (raises, "KeyError"),
        (spins, "of a processor"),
        (lambda copy: bytes(2**32), "MemoryError"),
        (lambda copy: os._exit(1), "the process ended"),
        (lambda copy: print("a\x1b[2J"), "prints"),
        (lambda copy: None, None),
    ],
)
def test_failing_reader_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read, failure
) -> None:
    """Oracle: readers made to fail; the next case still runs."""
    specimen = tmp_path / "specimens" / "made"
    specimen.mkdir(parents=True)
    (specimen / "file.json").write_text("{}")
    monkeypatch.setitem(READERS, "made", Reader("made", ("*",), read))
    monkeypatch.setattr(fuzz_readers, "PROCESSOR_SECONDS", 0.5)
    cases = [("made", 0), ("made", 1)]
    results = list(run_cases(cases, 0, tmp_path, processes=1))
    assert [result.case for result in results] == cases
    for result in results:
        assert (result.failure is None) if failure is None else failure in str(result.failure)
