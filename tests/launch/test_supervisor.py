"""Workers as processes: forks, exits, stops and restarts, and their messages."""

import gc
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from fsdptoys.launch import local_ranks
from fsdptoys.launch.forked_process import ForkedProcess
from fsdptoys.launch.rendezvous import endpoint as endpoint_module
from fsdptoys.train import stop
from tests.harness.launchers import free_port, runs
from tests.harness.levels import by_level
from tests.harness.processes import wait_until
from tests.launch.stranger import listening_sockets

KILLED = "was ended by SIGKILL, as the system does where host memory runs out"


def set_same_request(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set for how long signals count as one request, in launchers and in ranks that are forks."""
    monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", seconds)
    monkeypatch.setattr(local_ranks, "SAME_REQUEST_SECONDS", seconds)


def test_worker_exception_is_shown_once_and_ends_all_workers(
    launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: rank 1 raises; rank 0 waits in gloo, and its error is the consequence; rank 2 sleeps
    an hour, and records SIGTERM instead of dying of it. torch's agent would wait for it, here as
    long."""
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 3600))
    run = launched("fail", ranks=3)
    pids = run.workers()
    status, stderr = run.result()
    assert status == 1
    assert "fsdptoys: rank 1 failed:\nTraceback (most recent call last):\n" in stderr
    assert stderr.count("ZeroDivisionError: nothing to divide by") == 1
    assert stderr.count("Traceback") == 1
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize(
    ("how", "restarts", "status", "lines"),
    [
        ("mistake", 3, 2, ["train.steps=0 must be at least 1; set train.steps=1"]),
        ("exit", 0, 1, ["rank 1 ended with status 7 and left no traceback"]),
        (
            "worse",
            1,
            1,
            [
                "rank 1 ended with status 7 and left no traceback; restarting (1 of 1)",
                f"rank 1 {KILLED}, after 1 of 1 restarts",
            ],
        ),
    ],
)
def test_end_of_a_worker_is_reported_in_one_line_a_start(
    launched: Any, how: str, restarts: int, status: int, lines: list[str]
) -> None:
    """Oracle: the full stderr: a mistake that both ranks find, a status, and a kill after the only
    restart."""
    exit_status, stderr = launched(how, max_restarts=restarts).result()
    assert exit_status == status
    assert stderr == "".join(f"fsdptoys: {line}\n" for line in lines)


@pytest.mark.parametrize("forks", [False, True])
def test_worker_has_the_environment_of_a_new_interpreter(
    launched: Any, forks: bool
) -> None:
    """Oracle: the output of the two workers: threads, rank, a new session, arguments; default
    signals, no open files but the listing's, of the paths the working directory once, which is in
    PYTHONPATH here, and stdin."""
    run = launched("environment", forks=forks)
    assert run.result() == (0, "")
    message = sorted((run.folder / "stdout").read_text().splitlines())
    ranks = [f"1 {rank} True ['environment']" for rank in (0, 1)]
    assert message == sorted(
        [*ranks, *["['SIG_DFL', 'SIG_DFL']", "[]", "False True __main__ 0"] * 2]
    )


@pytest.mark.parametrize(
    "number",
    by_level(
        (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP),
        (signal.SIGINT, signal.SIGTERM),
    ),
)
def test_signal_before_training_ends_all_workers(
    launched: Any, number: signal.Signals
) -> None:
    """Oracle: the workers' process ids, which must be free afterwards."""
    run = launched("sleep", max_restarts=2)
    pids = run.workers()
    os.kill(run.pid, number)
    assert run.result() == (
        128 + number,
        f"fsdptoys: stopped by {number.name}; all workers have ended\n",
    )
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize(
    ("number", "times", "result"),
    [
        (signal.SIGUSR1, 3, (0, "")),
        (
            signal.SIGINT,
            1,
            (130, "fsdptoys: stopped by SIGINT; all workers have ended\n"),
        ),
    ],
)
def test_signal_during_training_lets_the_ranks_save(
    launched: Any,
    number: signal.Signals,
    times: int,
    result: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the signal of each rank; a batch system may send it three times in a row. Shells go
    on after status 0."""
    set_same_request(monkeypatch, 3600.0)
    run = launched("stop", max_restarts=2)
    pids = run.workers()
    for pid in (run.pid, pids[0], run.pid)[:times]:
        os.kill(pid, number)
    assert run.result() == result
    assert (
        run.wait_for_files("saved")
        == ["SIGTERM" if number == signal.SIGINT else number.name] * 2
    )


@pytest.mark.parametrize(
    ("first", "seconds", "status"),
    [
        (signal.SIGTERM, 3600.0, 130),
        (signal.SIGTERM, 0.0, 143),
        (signal.SIGINT, 3600.0, 130),
    ],
    ids=["same request", "second request", "Ctrl-C twice"],
)
def test_second_request_kills_all_workers(
    launched: Any,
    first: signal.Signals,
    seconds: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: workers that outlive the signals; those of the same request have no effect, which
    SIGINT then has."""
    set_same_request(monkeypatch, seconds)
    run = launched("deaf", max_restarts=2)
    pids = run.workers()
    os.kill(run.pid, first)
    run.wait_for_files("heard")
    if seconds:
        os.kill(run.pid, signal.SIGUSR1)
    os.kill(run.pid, signal.SIGINT if seconds else signal.SIGTERM)
    name = signal.Signals(status - 128).name
    assert run.result() == (
        status,
        f"fsdptoys: stopped by {name}; all workers have ended\n",
    )
    assert not any(runs(pid) for pid in pids)


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="Linux alone ends the children of a killed process",
)
def test_workers_end_with_a_killed_launcher(launched: Any) -> None:
    """Oracle: the process ids; both remember SIGTERM, and one waits in a collective."""
    run = launched("hang")
    pids = run.workers()
    os.kill(run.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(runs(pid) for pid in pids), "the end of the workers", pids
    )


def test_workers_restart_and_continue_in_the_same_directory(launched: Any) -> None:
    """Oracle: the first start raises, the second is killed, the third joins a new group and does
    the work."""
    run = launched("again", max_restarts=3)
    assert run.result() == (
        0,
        "fsdptoys: rank 0 failed: ZeroDivisionError: nothing to divide by; restarting (1 of 3)\n"
        f"fsdptoys: rank 1 {KILLED}; restarting (2 of 3)\n",
    )
    assert run.wait_for_files("done") == [f"2 {run.folder / 'run'}"] * 2


def test_hanging_rank_is_named(launched: Any) -> None:
    """Oracle: rank 1 sleeps where rank 0's last heartbeat has the same phase; gloo's timeout is
    real."""
    status, stderr = launched("wait").result()
    assert status == 1
    expired = (
        "a collective timed out (launch.timeout_seconds=3); the last heartbeat of all 2"
    )
    assert f"fsdptoys: rank 0 failed:\n{expired}" in stderr
    hung = "it hung, last heartbeat step 3 (backward)"
    ended = "^rank 1 raised no exception and had to be terminated: "
    assert re.search(rf"{ended}{re.escape(hung)}, \d+ s ago, pid ", stderr, re.M), (
        stderr
    )


@pytest.mark.parametrize(
    "how, sent",
    [("asked", signal.SIGTERM), ("early", signal.SIGUSR1), ("early", signal.SIGTERM)],
)
def test_signal_to_one_rank_is_a_request_to_stop(
    launched: Any, how: str, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: status and sentence, with restarts that must not be used; in the loop, the rank sends
    itself a second one, and rank 0 loses its connection; before it, rank 0 is ended by our side."""
    set_same_request(monkeypatch, 0.0)
    run = launched(how, max_restarts=2)
    os.kill(run.workers()[1], sent)
    message = (
        f"fsdptoys: stopped by {sent.name} (rank 1 got it); all workers have ended\n"
    )
    assert run.result() == (128 + sent, message)


@pytest.mark.skipif(
    not Path("/dev/shm").exists(), reason="semaphores are files on Linux alone"
)
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_killed_ranks_leave_no_semaphores(launched: Any, whom: str) -> None:
    """Oracle: the semaphores' names in /dev/shm, while the ranks run and afterwards; the tracker
    prints nothing."""
    run = launched("semaphores")
    pids = run.workers()
    message = [text.split() for text in run.wait_for_files("children")]
    paths = [Path(f"/dev/shm/sem.{fields[-1].lstrip('/')}") for fields in message]
    assert all(path.exists() for path in paths)
    os.kill(
        *((run.pid, signal.SIGINT) if whom == "launcher" else (pids[1], signal.SIGKILL))
    )
    status, stderr = run.result()
    assert (
        status == (130 if whom == "launcher" else 1) and len(stderr.splitlines()) == 1
    ), stderr
    trackers = [int(child) for fields in message for child in fields[:-1]]
    wait_until(
        lambda: not any(path.exists() for path in paths),
        "the removal of the semaphores",
        trackers,
    )
    wait_until(
        lambda: not any(runs(tracker) for tracker in trackers),
        "the end of the trackers",
        trackers,
    )


def test_killed_rank_is_reported_with_the_last_heartbeats(launched: Any) -> None:
    """Oracle: the step and phase of each rank's last heartbeat."""
    status, stderr = launched("lose").result()
    assert status == 1
    assert stderr.startswith(f"fsdptoys: rank 1 {KILLED}; ")
    assert (
        "; last heartbeats: rank 1 in step 3 (forward) " in stderr
        and ", rank 0 in step 3 (backward) " in stderr
    )


def test_occupied_rendezvous_port_is_reported_in_one_sentence(
    launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the message, for a service that accepts connections silently; torch's rendezvous
    would wait forever."""
    monkeypatch.setattr(endpoint_module, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert launched("nothing", nnodes=2, rdzv_endpoint=endpoint).result() == (
            2,
            (
                f"fsdptoys: launch.rdzv_endpoint={endpoint} cannot host the rendezvous (something "
                "else has that port); set it to the first machine's name and a free port, as "
                "host:port\n"
            ),
        )


def test_missing_node_ends_the_run_after_the_timeout(launched: Any) -> None:
    """Oracle: the message of a launcher that stays alone."""
    endpoint = f"127.0.0.1:{free_port()}"
    assert launched(
        "nothing", nnodes=2, rdzv_endpoint=endpoint, timeout_seconds=1
    ).result() == (
        2,
        (
            f"fsdptoys: launch.nnodes=2 machines were expected at launch.rdzv_endpoint={endpoint}, "
            "and 1 came within launch.timeout_seconds=1; start the same command on each, or set "
            "launch.nnodes to their number\n"
        ),
    )


def test_signal_ends_a_launcher_that_waits_for_another_node(launched: Any) -> None:
    """Oracle: status and sentence, long before its own timeout."""
    port = free_port()
    run = launched(
        "nothing", nnodes=2, rdzv_endpoint=f"127.0.0.1:{port}", timeout_seconds=3600
    )
    listens = ("0100007F", port)
    wait_until(lambda: listens in listening_sockets(run.pid), "the store", [run.pid])
    os.kill(run.pid, signal.SIGINT)
    assert run.result() == (
        130,
        "fsdptoys: stopped by SIGINT; all workers have ended\n",
    )


MODULE = """
import gc, os, sys

number = int(sys.argv[1])
os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), number)
gc.collect()
os.write(number, b"still open")
"""


class Endless:
    """A reference cycle with an open file, freed only by garbage collection."""

    def __init__(self, path: Path) -> None:
        self.itself = self
        self.file = path.open("w")


def test_garbage_of_the_parent_closes_no_file_of_the_fork(tmp_path: Path) -> None:
    """Oracle: the fork's output after a collection, to a file with the descriptor number of the
    parent's file."""
    (tmp_path / "writes.py").write_text(MODULE)
    gc.disable()
    try:
        number = Endless(tmp_path / "parents").file.fileno()
        forked = ForkedProcess(
            "writes",
            [str(number), str(tmp_path / "own")],
            {**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert forked.wait() == 0
    finally:
        gc.enable()
    assert (tmp_path / "own").read_text() == "still open"
