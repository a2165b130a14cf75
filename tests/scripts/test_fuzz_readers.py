"""The fuzzer of readers: readers are robust, and the fuzzer detects those that are not."""

import os
from pathlib import Path

import pytest

from scripts import fuzz_readers
from scripts.fuzz_readers import fuzz, run_cases
from scripts.fuzz_targets import READERS, Reader


@pytest.mark.extended
def test_mutated_files_cause_no_traceback() -> None:
    """Oracle: every reader's own errors; 200 cases of a full run of the fuzzer."""
    done, failed = fuzz(200, seed=0, progress=False)
    assert set(done) == set(READERS)
    assert not failed, "\n".join(f"{result.case} {result.mutation}: {result.failure}" for result in failed)


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
def test_failing_reader_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read, failure) -> None:
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
