"""Workers as processes: exits, stops and restarts, and their messages."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.launch import supervisor
from fsdptoys.train import stop
from tests.launch.launchers import runs


@pytest.mark.launcher
def test_worker_exception_is_shown_once_and_ends_all_workers(launched: Any) -> None:
    """Oracle: rank 1 raises; rank 0 waits in gloo, whose own error is the consequence; rank 2 sleeps an hour, and
    records SIGTERM instead of dying of it. torch's agent alone would wait half a minute for it; the
    bound separates the two, and ten seconds are usual."""
    run = launched("fail", ranks=3)
    pids = run.workers()
    status, stderr = run.result()
    seconds = time.time() - float((run.folder / "failed").read_text())
    assert status == 1
    assert "fsdptoys: rank 1 failed:\nTraceback (most recent call last):\n" in stderr
    assert stderr.count("ZeroDivisionError: nothing to divide by") == 1
    assert stderr.count("Traceback") == 1
    assert seconds < 25, "the agent's half a minute was waited for"
    assert not any(runs(pid) for pid in pids)


@pytest.mark.launcher
def test_config_error_is_reported_in_one_sentence_without_a_restart(launched: Any) -> None:
    """Oracle: the full stderr; both ranks find it, and three restarts are allowed."""
    message = "fsdptoys: train.steps=0 must be at least 1; set train.steps=1\n"
    assert launched("mistake", max_restarts=3).result() == (2, message)


@pytest.mark.launcher
@pytest.mark.parametrize("forks", [False, True])
def test_worker_has_the_environment_of_a_new_interpreter(launched: Any, forks: bool) -> None:
    """Oracle: the output of the two workers: threads, rank, a new session, arguments; default signals, no
    open files but the listing's, of the paths the working directory once, which is in PYTHONPATH here, and stdin."""
    run = launched("environment", forks=forks)
    assert run.result() == (0, "")
    message = sorted((run.folder / "stdout").read_text().splitlines())
    own = [f"1 {rank} True ['environment']" for rank in (0, 1)]
    assert message == sorted([*own, *["['SIG_DFL', 'SIG_DFL']", "[]", "False True __main__ 0"] * 2])


@pytest.mark.launcher
def test_status_of_a_worker_without_a_record_is_reported(launched: Any) -> None:
    """Oracle: the full stderr."""
    assert launched("exit").result() == (1, "fsdptoys: rank 1 ended with status 7 and left no traceback\n")


@pytest.mark.launcher
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signal_before_training_ends_all_workers(launched: Any, number: signal.Signals) -> None:
    """Oracle: the workers' process ids, which must be free afterwards."""
    run = launched("sleep", max_restarts=2)
    pids = run.workers()
    os.kill(run.pid, number)
    assert run.result() == (128 + number, f"fsdptoys: stopped by {number.name}; all workers have ended\n")
    assert not any(runs(pid) for pid in pids)


@pytest.mark.launcher
def test_signal_during_training_ends_with_status_0(launched: Any, monkeypatch: Any) -> None:
    """Oracle: the signal of each rank; it is sent three times in a row, as a batch system may do. A busy machine may
    take over a second for the three, so the forked launcher and ranks count a minute as one request."""
    monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 60.0)
    monkeypatch.setattr(supervisor, "SAME_REQUEST_SECONDS", 60.0)
    run = launched("stop", max_restarts=2)
    pids = run.workers()
    for pid in (run.pid, pids[0], run.pid):
        os.kill(pid, signal.SIGUSR1)
    assert run.result() == (0, "")
    assert [(run.folder / f"saved{rank}").read_text() for rank in range(2)] == ["SIGUSR1"] * 2


@pytest.mark.launcher
def test_second_signal_kills_all_workers(launched: Any) -> None:
    """Oracle: workers that ignore both; the first signal, and one immediately after it, must have no effect."""
    run = launched("deaf", max_restarts=2)
    pids = run.workers()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(run.pid, number)
    time.sleep(1.2)
    assert all(runs(pid) for pid in pids)
    os.kill(run.pid, signal.SIGTERM)
    assert run.result() == (143, "fsdptoys: stopped by SIGTERM; all workers have ended\n")
    assert not any(runs(pid) for pid in pids)


@pytest.mark.launcher
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone ends the children of a killed process")
def test_workers_end_with_a_killed_launcher(launched: Any) -> None:
    """Oracle: the process ids; both remember SIGTERM, and one waits in a collective."""
    run = launched("hang")
    pids = run.workers()
    os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their launcher"
        time.sleep(0.05)


@pytest.mark.launcher
def test_workers_restart_and_continue_in_the_same_directory(launched: Any) -> None:
    """Oracle: the first start raises, the second is killed, the third joins a new group and does the work."""
    run = launched("again", max_restarts=3)
    status, stderr = run.result()
    assert (status, stderr.splitlines()) == (
        0,
        [
            "fsdptoys: rank 0 failed: ZeroDivisionError: nothing to divide by; restarting (1 of 3)",
            "fsdptoys: rank 1 was ended by SIGKILL, as the system does where host memory runs out; restarting (2 of 3)",
        ],
    )
    assert [(run.folder / f"done{rank}").read_text() for rank in range(2)] == [f"2 {run.folder / 'run'}"] * 2


@pytest.mark.launcher
def test_final_failure_reports_the_number_of_restarts(launched: Any) -> None:
    """Oracle: both lines; the first start ends with a status, and the one allowed restart is killed."""
    status, stderr = launched("worse", max_restarts=1).result()
    assert status == 1
    first, last = stderr.splitlines()
    assert first == "fsdptoys: rank 1 ended with status 7 and left no traceback; restarting (1 of 1)"
    assert last.startswith(
        "fsdptoys: rank 1 was ended by SIGKILL, as the system does where host memory runs out, after 1 of 1 restarts"
    )


@pytest.mark.launcher
def test_hanging_rank_is_named(launched: Any) -> None:
    """Oracle: rank 1 sleeps where rank 0's last heartbeat has the same phase; gloo's timeout is real."""
    status, stderr = launched("wait").result()
    assert status == 1
    assert (
        "fsdptoys: rank 0 failed:\na collective timed out (launch.timeout_seconds=3); the last heartbeat of all 2"
        in stderr
    )
    assert re.search(
        r"^rank 1 raised no exception and had to be terminated: it hung, last heartbeat step 3 \(backward\), "
        r"\d+ s ago, pid ",
        stderr,
        re.M,
    ), stderr


@pytest.mark.launcher
@pytest.mark.parametrize("how, sent", [("asked", signal.SIGTERM), ("early", signal.SIGUSR1), ("early", signal.SIGTERM)])
def test_signal_to_one_rank_is_a_request_to_stop(launched: Any, how: str, sent: signal.Signals) -> None:
    """Oracle: status and sentence, with restarts that must not be used; in the loop, the rank sends itself a second
    one, and rank 0 loses its connection; before it, rank 0 is ended by our side."""
    run = launched(how, max_restarts=2)
    os.kill(run.workers()[1], sent)
    number = signal.SIGTERM if how == "asked" else sent
    assert run.result() == (
        128 + number,
        f"fsdptoys: stopped by {number.name} (rank 1 got it); all workers have ended\n",
    )


@pytest.mark.launcher
@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="semaphores are files on Linux alone")
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_killed_ranks_leave_no_semaphores(launched: Any, whom: str) -> None:
    """Oracle: the semaphores' names in /dev/shm, while the ranks run and afterwards; the tracker prints nothing."""
    run = launched("semaphores")
    pids = run.workers()
    message = [(run.folder / f"children{rank}").read_text().split() for rank in range(2)]
    paths = [Path(f"/dev/shm/sem.{words[-1].lstrip('/')}") for words in message]
    assert all(path.exists() for path in paths)
    os.kill(*((run.pid, signal.SIGINT) if whom == "launcher" else (pids[1], signal.SIGKILL)))
    status, stderr = run.result()
    assert status == (130 if whom == "launcher" else 1) and len(stderr.splitlines()) == 1, stderr
    children = [int(child) for words in message for child in words[:-1]]
    deadline = time.monotonic() + 10
    while any(path.exists() for path in paths) or any(runs(child) for child in children):
        assert time.monotonic() < deadline, "semaphores or trackers are left"
        time.sleep(0.05)


@pytest.mark.launcher
def test_killed_rank_is_reported_with_the_last_heartbeats(launched: Any) -> None:
    """Oracle: the step and phase of each rank's last heartbeat."""
    status, stderr = launched("lose").result()
    assert status == 1
    assert stderr.startswith("fsdptoys: rank 1 was ended by SIGKILL, as the system does where host memory runs out; ")
    assert "; last heartbeats: rank 1 in step 3 (forward) " in stderr and ", rank 0 in step 3 (backward) " in stderr


@pytest.mark.launcher
def test_occupied_rendezvous_port_is_reported_in_one_sentence(launched: Any) -> None:
    """Oracle: the message, for a service that accepts connections silently; torch's rendezvous would wait forever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert launched("environment", nnodes=2, rdzv_endpoint=endpoint).result() == (
            2,
            f"fsdptoys: launch.rdzv_endpoint={endpoint} cannot host the rendezvous (something else has that port); set "
            "it to the first machine's name and a free port, as host:port\n",
        )
