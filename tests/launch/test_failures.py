"""The first of several failures, a worker's own record, and the recordings of NCCL and HCCL."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptoys.errors import ConfigError, GivenUpError, LostRanksError
from fsdptoys.launch.exit_record import (
    EXIT_RECORD_VARIABLE,
    ExitRecord,
    read_exit_record,
    write_exit_record,
)
from fsdptoys.launch.failures import (
    FILE_NAMES,
    HCCL_FILE_NAME,
    FirstFailure,
    first_failure,
    keep_recordings,
    make_exit_record,
    name_recordings,
)
from fsdptoys.launch.worker import run_as_worker
from fsdptoys.profiler import ExplainedOutOfMemoryError


def record(folder: Path, message: str, rank: int, time_ns: int = 1) -> ProcessFailure:
    """Write a rank's exception in the format of ``run_as_worker``, as of a rank that may be started
    again."""
    extra = {
        "rank": rank,
        "time_ns": time_ns,
        "timestamp": "0",
        "py_callstack": message,
    }
    extra |= {"config_error": None, "given_up": None, "final": False}
    folder.mkdir(exist_ok=True)
    (folder / "error.json").write_text(
        json.dumps({"message": {"message": message, "extraInfo": extra}})
    )
    return ProcessFailure(rank, 100 + rank, 1, str(folder / "error.json"))


LOST = "RuntimeError: Connection closed by peer"
TIMED_OUT = "RuntimeError: Wait timeout"


@pytest.mark.parametrize(
    "ends, by_us, message",
    [
        ({0: LOST, 1: "ValueError: x"}, (), "rank 1 failed"),
        ({1: "ValueError: y", 0: "ValueError: x"}, (), "rank 1 failed"),
        ({0: LOST}, (), "rank 0 failed"),
        ({0: LOST, 1: -9}, (), "rank 1 was ended by SIGKILL"),
        ({0: LOST, 1: -9}, (1,), "rank 0 failed"),
        ({0: "ValueError: x", 1: -9, 2: 143}, (), "rank 0 failed"),
        ({0: f"LostRanksError: {TIMED_OUT}", 1: "ValueError: y"}, (), "rank 1 failed"),
        ({0: LOST, 1: TIMED_OUT}, (), "rank 1 failed"),
        ({0: TIMED_OUT, 1: -6}, (), "rank 1 was ended by SIGABRT"),
        ({0: TIMED_OUT, 1: -15}, (1,), "rank 0 failed"),
        ({0: -15, 1: -11}, (0,), "rank 1 was ended by SIGSEGV"),
        ({0: -15}, (0,), "rank 0 was ended by SIGTERM"),
        ({0: 3}, (), "rank 0 ended with status 3 and left no traceback"),
        (
            {2: -9},
            (),
            "rank 2 was ended by SIGKILL, as the system does where host memory runs out",
        ),
    ],
)
def test_root_cause_is_distinguished_from_its_consequences(
    ends: dict[int, str | int], by_us: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    """Oracle: the rank that failed on its own, regardless of the order in which the launcher saw
    failures.

    A rank ends with an exception, in the order of time, or with a status. Memory ran out where the
    system has sent SIGKILL, as far as known, and not the launcher.
    """
    failures = {}
    for time_ns, (rank, end) in enumerate(ends.items()):
        if isinstance(end, int):
            failures[rank] = ProcessFailure(rank, 100 + rank, end, "nowhere")
        else:
            failures[rank] = record(
                tmp_path / str(rank), end, rank=rank, time_ns=time_ns
            )
    terminated = [rank for rank in by_us if ends[rank] == -signal.SIGTERM]
    first = first_failure(failures, tmp_path, set(by_us) - set(terminated), terminated)
    assert (
        first.status == 1
        and first.message().startswith(message)
        and "\n" not in first.in_short
    )
    assert not first.stopped
    assert first.silent == ("ended" in message)
    assert not first.silent or first.reason == first.headline
    rank = int(message.split()[1])
    assert first.out_of_memory == (ends[rank] == -signal.SIGKILL and rank not in by_us)


NO_ROOM = "Unable to allocate 8.00 TiB for an array"
NO_MEMORY = (
    f"host memory ran out in work ({NO_ROOM}); set fewer ranks on this machine, a smaller model, "
    "train.batch_size or train.seq_len, or data that takes less memory"
)


@pytest.mark.parametrize(
    "error, message, in_short",
    [
        (
            ConfigError("train.steps=0 is wrong"),
            "train.steps=0 is wrong",
            "ConfigError: train.steps=0 is wrong",
        ),
        (
            ExplainedOutOfMemoryError("out\nof it"),
            "rank 3 failed:\nout\nof it",
            "ExplainedOutOfMemoryError: out",
        ),
        (
            MemoryError(NO_ROOM),
            f"rank 3 failed:\n{NO_MEMORY}",
            f"ExplainedOutOfMemoryError: {NO_MEMORY}",
        ),
        (
            LostRanksError("rank 1 is late"),
            "rank 3 failed:\nrank 1 is late",
            "rank 1 is late",
        ),
        (
            ZeroDivisionError("by 0"),
            "rank 3 failed:\nTraceback (most recent ",
            "ZeroDivisionError: by 0",
        ),
        (
            RuntimeError("MemoryError: x"),
            "rank 3 failed:\nTraceback (most recent ",
            "RuntimeError: MemoryError: x",
        ),
    ],
)
def test_worker_records_its_failure(
    error: Exception,
    message: str,
    in_short: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the record read back from the file; an error that would recur is final and has no
    traceback.

    The class of an error decides whether memory ran out, not the text of its message.
    """
    status = 2 if isinstance(error, ConfigError) else 1
    out_of_memory = isinstance(error, ExplainedOutOfMemoryError | MemoryError)
    final = out_of_memory or isinstance(error, ConfigError)
    first = recorded(error, status, tmp_path, monkeypatch)
    assert (first.status, first.final, first.silent) == (status, final, False)
    assert first.message().startswith(message)
    assert first.in_short == f"rank 3 failed: {in_short}"
    outcome = make_exit_record(1, "a message", None, first)
    reason = first.headline if status == 2 else f"rank 3 failed: {in_short}"
    assert outcome.reason == reason.replace(" ExplainedOutOfMemoryError:", "")
    assert outcome.out_of_memory == out_of_memory


def recorded(
    error: Exception, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> FirstFailure:
    """The failure of a worker of rank 3 that raises ``error`` and is expected to end with
    ``status``."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    monkeypatch.setenv("RANK", "3")

    def work() -> None:
        raise error

    process = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(run_as_worker(work))
    )
    process.start()
    process.join()
    assert process.exitcode == status
    failure = ProcessFailure(3, process.pid or 0, status, str(folder / "error.json"))
    return first_failure({3: failure}, folder)


@pytest.mark.parametrize(
    "exitcodes, message",
    [
        ({0: 143}, "stopped by SIGTERM (rank 0 got it); all workers have ended"),
        (
            {1: 128 + signal.SIGUSR1, 0: -15},
            "stopped by SIGUSR1 (rank 1 got it); all workers have ended",
        ),
        ({1: -2, 2: -6}, "stopped by SIGINT (rank 1 got it); all workers have ended"),
    ],
)
def test_requested_stop_of_a_rank_is_no_failure(
    exitcodes: dict[int, int], message: str, tmp_path: Path
) -> None:
    """Oracle: the message; our side ended rank 0 where it died of SIGTERM, and another rank lost
    its connection."""
    record(tmp_path, "RuntimeError: Connection closed by peer", rank=3)
    failures = {
        rank: ProcessFailure(rank, 100 + rank, code, "nowhere")
        for rank, code in exitcodes.items()
    }
    first = first_failure(
        failures,
        tmp_path,
        terminated=[rank for rank, code in exitcodes.items() if code == -15],
    )
    assert first.message() == message and first.stopped and first.final
    assert first.status == 128 + signal.Signals[message.split()[2]]


def test_joint_decision_of_all_ranks_names_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exact message that the launcher prints."""
    sentence = "stopped after step 6: 5 skipped"
    first = recorded(GivenUpError(sentence), 1, tmp_path, monkeypatch)
    assert (first.message(), first.status, first.final) == (sentence, 1, True)


NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
HCCL = {"TORCH_HCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize(
    "present, name",
    [
        (NCCL, FILE_NAMES[1]),
        (NCCL | {"TORCH_FR_BUFFER_SIZE": "2000"}, FILE_NAMES[0]),
        (HCCL, HCCL_FILE_NAME),
    ],
)
def test_recordings_are_kept_in_the_run_directory(
    present: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: files written under the name that the environment gives are found in the run
    directory."""
    with monkeypatch.context() as environment:
        for variable, value in {**present, name: ""}.items():
            environment.setenv(variable, value)
        environment.delenv(name)
        launch = tmp_path / "launch"
        run = tmp_path / "run"
        launch.mkdir()
        run.mkdir()
        name_recordings(launch)
        assert keep_recordings(launch, run) is None
        prefix = os.environ[name]
        Path(f"{prefix}3").write_text("recorded")
        (tmp_path / "precious").write_text("precious")
        (run / "flight_recorder").mkdir()
        (run / "flight_recorder" / "rank_3").symlink_to(tmp_path / "precious")
        message = keep_recordings(launch, run)
    assert (run / "flight_recorder" / "rank_3").read_text() == "recorded"
    assert (tmp_path / "precious").read_text() == "precious"
    assert message is not None and str(run / "flight_recorder") in message


def test_signal_is_reported_even_with_exit_status_0() -> None:
    """Oracle: a run that ends with status 0 after a request to stop is not complete."""
    assert make_exit_record(0, None, signal.SIGTERM, None).stopped_by == "SIGTERM"
    assert make_exit_record(130, "stopped", signal.SIGINT, None).stopped_by == "SIGINT"
    assert (
        make_exit_record(
            143, "stopped by SIGTERM (rank 1 got it)", None, None
        ).stopped_by
        == "SIGTERM"
    )
    assert make_exit_record(0, None, None, None) == ExitRecord(0)


def test_outcome_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the outcome written; a missing or torn file gives none, and nothing is written where
    no file is named."""
    path = tmp_path / "outcome.json"
    outcome = ExitRecord(1, "why", out_of_memory=True)
    monkeypatch.delenv(EXIT_RECORD_VARIABLE, raising=False)
    write_exit_record(outcome)
    assert not list(tmp_path.iterdir()) and read_exit_record(path) is None
    monkeypatch.setenv(EXIT_RECORD_VARIABLE, str(path))
    write_exit_record(outcome)
    assert read_exit_record(path) == outcome and list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    assert read_exit_record(path) is None


def test_user_defined_location_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the environment."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.setenv(FILE_NAMES[1], "/elsewhere/rank_")
    name_recordings(tmp_path)
    assert [os.environ.get(name) for name in FILE_NAMES] == [None, "/elsewhere/rank_"]


def test_unwritable_outcome_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: no exception and no partial file, for a missing folder and for a path of a folder."""
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "gone" / "outcome.json", tmp_path / "taken"):
        monkeypatch.setenv(EXIT_RECORD_VARIABLE, str(path))
        write_exit_record(ExitRecord(0))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
