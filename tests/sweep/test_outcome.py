"""The outcome file that a launcher writes for programs, and the sources of its fields."""

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptoys.cli.main import main
from fsdptoys.launch.exit_record import EXIT_RECORD_VARIABLE, ExitRecord, read_exit_record, write_exit_record
from fsdptoys.launch.failures import first_failure, make_exit_record


def silent(exit_status: int) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=1, exitcode=exit_status, error_file="<N/A>")


def recorded(folder: Path, message: str, traceback: str) -> ProcessFailure:
    """A rank's exception in the format that ``worker`` writes."""
    extra = {"py_callstack": traceback, "time_ns": 1, "rank": 0, "config_error": None, "given_up": None, "final": True}
    path = folder / "error.json"
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra | {"timestamp": "1"}}}))
    return ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))


@pytest.mark.parametrize(
    ("exit_status", "killed", "out_of_memory"),
    [(-signal.SIGKILL, [], True), (-signal.SIGKILL, [0], False), (-signal.SIGSEGV, [], False), (3, [], False)],
)
def test_sigkill_from_outside_counts_as_out_of_memory(
    tmp_path: Path, exit_status: int, killed: list[int], out_of_memory: bool
) -> None:
    """Oracle: only a SIGKILL not sent by the launcher; no other silent end of a rank."""
    first = first_failure({0: silent(exit_status)}, tmp_path, killed)
    outcome = make_exit_record(1, first.message(), None, first)
    assert outcome.out_of_memory is out_of_memory
    assert outcome.reason == first.headline


@pytest.mark.parametrize(
    ("message", "reason", "out_of_memory"),
    [
        ("ExplainedOutOfMemoryError: host memory ran out\nlive:", "rank 0 failed: host memory ran out", True),
        ("OutOfMemoryError: CUDA out of memory.", "rank 0 failed: OutOfMemoryError: CUDA out of memory.", True),
        ("MemoryError: ", "rank 0 failed: MemoryError:", True),
        ("RuntimeError: OutOfMemoryError", "rank 0 failed: RuntimeError: OutOfMemoryError", False),
    ],
)
def test_exception_is_reported_by_its_class_and_first_line(
    tmp_path: Path, message: str, reason: str, out_of_memory: bool
) -> None:
    """Oracle: the recorded error class decides, not the text of its message."""
    failure = recorded(tmp_path, message, "Traceback …\n" + message)
    outcome = make_exit_record(1, "a message", None, first_failure({0: failure}, tmp_path))
    assert (outcome.reason, outcome.out_of_memory) == (reason, out_of_memory)


def test_signal_is_reported_even_with_exit_status_0() -> None:
    """Oracle: a run that ends with status 0 after a request to stop is not complete."""
    assert make_exit_record(0, None, signal.SIGTERM, None).stopped_by == "SIGTERM"
    assert make_exit_record(130, "stopped", signal.SIGINT, None).stopped_by == "SIGINT"
    assert make_exit_record(143, "stopped by SIGTERM (rank 1 got it)", None, None).stopped_by == "SIGTERM"
    assert make_exit_record(0, None, None, None) == ExitRecord(0)


def test_outcome_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the outcome written; a missing or torn file gives none, and nothing is written where no file is named."""
    path, outcome = tmp_path / "outcome.json", ExitRecord(1, "why", out_of_memory=True)
    monkeypatch.delenv(EXIT_RECORD_VARIABLE, raising=False)
    write_exit_record(outcome)
    assert not list(tmp_path.iterdir()) and read_exit_record(path) is None
    monkeypatch.setenv(EXIT_RECORD_VARIABLE, str(path))
    write_exit_record(outcome)
    assert read_exit_record(path) == outcome and list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    assert read_exit_record(path) is None


def test_unwritable_outcome_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no exception and no partial file, for a missing folder and for a path of a folder."""
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "gone" / "outcome.json", tmp_path / "taken"):
        monkeypatch.setenv(EXIT_RECORD_VARIABLE, str(path))
        write_exit_record(ExitRecord(0))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_mistake_before_the_start_is_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message on stderr."""
    monkeypatch.setenv(EXIT_RECORD_VARIABLE, str(tmp_path / "outcome.json"))
    assert main(["train", "train.step=1"]) == 2
    outcome = read_exit_record(tmp_path / "outcome.json")
    assert outcome is not None and outcome.status == 2
    assert outcome.reason == "train.step=1 names a key that does not exist; did you mean train.steps=1?"
