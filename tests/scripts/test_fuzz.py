"""The fuzzer of readers and checkpoints: nothing fails, and it detects what does."""

import os
from pathlib import Path

import pytest

from fsdptoys.checkpoint import load as reading
from scripts.fuzz import fuzz_readers
from scripts.fuzz.fuzz_checkpoint import resume_damaged, save_steps
from scripts.fuzz.fuzz_readers import plan_cases, run_cases
from scripts.fuzz.fuzz_targets import READERS, Reader


@pytest.mark.extended
def test_mutated_files_cause_no_traceback_and_no_other_values() -> None:
    """Oracle: every reader's own errors, and the saved values; a full run of the fuzzer."""
    counts, failed = fuzz_readers.fuzz(plan_cases(2000, None), seed=0)
    assert set(counts) == set(READERS)
    assert not failed, "\n".join(
        f"{result.case} {result.mutation}: {result.failure}" for result in failed
    )


@pytest.mark.extended
def test_undetected_damage_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: checkpoints without a check of checksums; without damage the newest is loaded."""
    specimens = tmp_path / "specimens"
    save_steps(specimens / "steps")
    resume_damaged(specimens / "steps")
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    results = run_cases(
        [("damaged checkpoints", number) for number in range(150)], 0, specimens
    )
    assert sum(result.failure is not None for result in results) > 2


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
    specimens = tmp_path / "specimens"
    (specimens / "made").mkdir(parents=True)
    (specimens / "made" / "file.json").write_text("{}")
    monkeypatch.setitem(READERS, "made", Reader("made", ("*",), read))
    monkeypatch.setattr(fuzz_readers, "PROCESSOR_SECONDS", 1)
    cases = [("made", 0), ("made", 1)]
    results = list(run_cases(cases, 0, specimens))
    assert [result.case for result in results] == cases
    for result in results:
        assert (
            (result.failure is None)
            if failure is None
            else failure in str(result.failure)
        )
