"""Which failure came first, and what a worker records of its own."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptoys.errors import ConfigError, GivenUpError, LostRanksError
from fsdptoys.failures import first_failure
from fsdptoys.profiler import ExplainedOutOfMemoryError
from fsdptoys.worker import run_as_worker


@pytest.mark.parametrize(
    "records, exitcodes, killed, shown",
    [
        ({0: ("RuntimeError: Connection closed by peer", 1), 1: ("ValueError: x", 2)}, {}, (), "rank 1 failed"),
        ({0: ("ValueError: x", 1), 1: ("ValueError: y", 2)}, {}, (), "rank 0 failed"),
        ({0: ("ValueError: x", 2), 1: ("ValueError: y", 1)}, {}, (), "rank 1 failed"),
        ({0: ("RuntimeError: Broken pipe", 1)}, {}, (), "rank 0 failed"),
        ({0: ("RuntimeError: Broken pipe", 1)}, {1: -9}, (), "rank 1 was ended by SIGKILL"),
        ({0: ("RuntimeError: Broken pipe", 1)}, {1: -9}, (1,), "rank 0 failed"),
        ({0: ("LostRanksError: Timed out waiting 9ms for recv", 1), 1: ("ValueError: y", 2)}, {}, (), "rank 1 failed"),
        ({0: ("RuntimeError: Broken pipe", 1), 1: ("RuntimeError: Wait timeout", 2)}, {}, (), "rank 1 failed"),
        ({0: ("RuntimeError: Wait timeout", 1)}, {1: -6}, (), "rank 1 was ended by SIGABRT"),
        ({0: ("RuntimeError: Wait timeout", 1)}, {1: -15}, (), "rank 0 failed"),
        ({}, {0: -15, 1: -11}, (), "rank 1 was ended by SIGSEGV"),
        ({}, {0: -9, 1: -11}, (0,), "rank 1 was ended by SIGSEGV"),
        ({}, {0: -15}, (), "rank 0 was ended by SIGTERM"),
    ],
)
def test_cause_is_told_from_its_consequences(
    records: dict[int, tuple[str, int]], exitcodes: dict[int, int], killed: tuple[int, ...], shown: str, tmp_path: Path
) -> None:
    """Oracle: the rank that failed of itself, whichever the launcher saw first."""
    failures = {}
    for rank, (message, time_ns) in records.items():
        path = tmp_path / str(rank) / "error.json"
        path.parent.mkdir()
        extra = {"rank": rank, "time_ns": time_ns, "timestamp": "0", "py_callstack": message}
        extra |= {"config_error": None, "final": False}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(path))
    failures |= {rank: ProcessFailure(rank, 100 + rank, code, "nowhere") for rank, code in exitcodes.items()}
    first = first_failure(failures, tmp_path, killed)
    assert first.status == 1 and first.told.startswith(shown) and "\n" not in first.in_short


@pytest.mark.parametrize(
    "error, status, final, told, in_short",
    [
        (
            ConfigError("train.steps=0 is wrong"),
            2,
            True,
            "train.steps=0 is wrong",
            "ConfigError: train.steps=0 is wrong",
        ),
        (
            ExplainedOutOfMemoryError("out\nof it"),
            1,
            True,
            "rank 3 failed:\nout\nof it",
            "ExplainedOutOfMemoryError: out",
        ),
        (GivenUpError("5 skipped"), 1, True, "rank 3 failed:\n5 skipped", "GivenUpError: 5 skipped"),
        (LostRanksError("rank 1 is late"), 1, False, "rank 3 failed:\nrank 1 is late", "rank 1 is late"),
        (ZeroDivisionError("by 0"), 1, False, "rank 3 failed:\nTraceback (most recent ", "ZeroDivisionError: by 0"),
    ],
)
def test_worker_records_how_it_failed(
    error: Exception,
    status: int,
    final: bool,
    told: str,
    in_short: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: what is read back from the file; an error that would come again is final, and needs no traceback."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("FSDPTOYS_LAUNCHED", raising=False)

    def work() -> None:
        raise error

    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(run_as_worker(work)))
    process.start()
    process.join(60)
    assert process.exitcode == status
    failure = ProcessFailure(3, process.pid or 0, status, str(tmp_path / "error.json"))
    first = first_failure({3: failure}, tmp_path)
    assert (first.status, first.final, first.silent) == (status, final, False)
    assert first.told.startswith(told)
    assert first.in_short == f"rank 3 failed: {in_short}"


def test_killed_worker_is_told_with_the_likely_reason() -> None:
    """Oracle: the sentence."""
    first = first_failure({2: ProcessFailure(2, 9, -signal.SIGKILL, "nowhere")}, Path("nowhere"))
    assert first.told == "rank 2 was ended by SIGKILL, as the system does where host memory runs out"
    assert first.silent and not first.final
