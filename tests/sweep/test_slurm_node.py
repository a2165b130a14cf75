"""One node's part of a batch queue's job, with processes that replace training."""

import errno
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.sweep import runner
from fsdptoys.sweep import slurm_node as nodes
from fsdptoys.sweep.folder import Job, JobStatus, read_job
from fsdptoys.sweep.slurm_node import run_on_node
from fsdptoys.utils.regular_file import read_regular
from tests.sweep.jobs import (
    ENDS_WELL_WHEN_ASKED,
    TINY,
    job_folder,
    make_sweep,
    once_ready,
    stand_in,
    write_status,
)

BEFORE_LIMIT = "the queue asked it to end ({}), as it does before its own time limit"


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGUSR1, JobStatus.timed_out, BEFORE_LIMIT),
        (signal.SIGUSR2, JobStatus.timed_out, BEFORE_LIMIT),
        (signal.SIGTERM, JobStatus.stopped, "the queue ended it ({})"),
    ],
)
def test_queues_signal_stops_the_launcher_cleanly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: JobStatus,
    reason: str,
) -> None:
    """Oracle: the launcher's status 0, with which the job would otherwise count as done."""
    folder = job_folder(tmp_path)
    waits = threading.Event()
    wait = runner._wait

    def note_and_wait(*args: Any) -> Any:
        waits.set()
        return wait(*args)

    def ask() -> None:
        waits.wait()  # from here on the task knows the process to which it passes signals on
        os.kill(os.getpid(), number)

    monkeypatch.setattr(runner, "_wait", note_and_wait)
    with once_ready(folder, ask):
        run_on_node(folder, 0, ["here"], 7, stand_in(ENDS_WELL_WHEN_ASKED))
    job = read_job(folder)
    assert (job.status, job.exit_status) == (status, 0)
    assert job.reason == reason.format(number.name)


def test_nodes_rendezvous_at_the_first_which_alone_writes_the_job_file(
    tmp_path: Path,
) -> None:
    """Oracle: the arguments that two nodes' launchers received, and the single job file."""
    folder = job_folder(tmp_path, "launch.nnodes=2")
    command = stand_in(
        "leave.with_name(leave.stem + '-words.json').write_text(json.dumps(sys.argv[1:]))"
    )
    context = multiprocessing.get_context("fork")
    other = context.Process(
        target=run_on_node, args=(folder, 1, ["n1", "n2"], 12345, command)
    )
    other.start()
    other.join()
    assert read_job(folder).status is JobStatus.waiting
    run_on_node(folder, 0, ["n1", "n2"], 12345, command)
    first, second = (
        json.loads((folder / f"{name}-words.json").read_text())
        for name in ("outcome", "outcome-node1-12345")
    )
    assert (
        first
        == second
        == ["launch.rdzv_endpoint=n1:22345", *TINY, "launch.nnodes=2", first[-1]]
    )
    assert first[-1] == f"metrics.run_dir='{folder}/run'"
    assert read_job(folder).status is JobStatus.completed and other.exitcode == 0


@pytest.mark.parametrize(
    "second_hand",
    [
        "another machine ended the run; its output says why",
        (
            "rank 0 failed: the connection to another rank broke [Connection closed by peer "
            "[127.0.0.1]:60571]"
        ),
    ],
)
def test_failed_node_reports_the_reason(
    tmp_path: Path, second_hand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the reason known only to the second node's launcher, with those of earlier
    attempts."""
    folder = job_folder(tmp_path, "launch.nnodes=2")
    record = {
        "status": 1,
        "reason": "rank 1 was ended by SIGKILL",
        "out_of_memory": True,
    }
    earlier = json.dumps({"status": 1, "reason": "an earlier start's"})
    for start in ("6", "7"):
        (folder / f"outcome-node1-{start}.json").write_text(earlier)
    (folder / "outcome-node1-7.2.json").write_text(json.dumps(record))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    unknown = json.dumps({"status": 1, "reason": second_hand})
    run_on_node(
        folder,
        0,
        ["n1", "n2"],
        7,
        stand_in(f"leave.write_text({unknown!r}); sys.exit(1)"),
    )
    job = read_job(folder)
    assert (job.status, job.reason) == (
        JobStatus.out_of_memory,
        "node 1: rank 1 was ended by SIGKILL",
    )


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Folder of a job on two nodes, which the first one runs."""
    folder = job_folder(tmp_path, "launch.nnodes=2")
    write_status(folder, JobStatus.running)
    return folder


def test_node_stops_its_launcher_when_the_first_has_ended(
    running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a launcher that would sleep for an hour, of a job that ends after it was seen
    running."""
    monkeypatch.setattr(nodes, "LAUNCHERS_SECONDS", 0.5)

    def read_and_end(folder: Path) -> Job:
        job = read_job(folder)
        if (folder / "ready").exists():
            write_status(folder, JobStatus.timed_out)
        return job

    monkeypatch.setattr(nodes, "read_job", read_and_end)
    run_on_node(
        running,
        1,
        ["n1", "n2"],
        7,
        stand_in("leave.with_name('ready').touch(); time.sleep(3600)"),
    )
    assert not list(running.glob("outcome-node1*"))


def test_job_finished_in_the_meantime_is_not_run_again(tmp_path: Path) -> None:
    """Oracle: its file, with a command that would write another."""
    folder = job_folder(tmp_path)
    write_status(folder, JobStatus.completed)
    completed = read_job(folder)
    run_on_node(folder, 0, ["here"], 7, stand_in("sys.exit(1)"))
    assert read_job(folder) == completed and not (folder / "log.txt").exists()


def test_briefly_stale_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the job as written."""
    sweep = make_sweep(tmp_path, [()])
    left = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * 2

    def read_stale(path: Path, largest_bytes: int) -> bytes:
        if left:
            raise left.pop()
        return read_regular(path, largest_bytes)

    monkeypatch.setattr("fsdptoys.sweep.folder.read_regular", read_stale)
    assert read_job(sweep.job_folder(sweep.jobs[0])) == sweep.jobs[0]


def test_requeued_job_starts_from_scratch(tmp_path: Path) -> None:
    """Oracle: the first attempt's file, which is kept aside and not visible to the second."""
    folder = job_folder(tmp_path)
    (folder / "run").mkdir()
    (folder / "run" / "left").touch()
    write_status(folder, JobStatus.stopped, "the queue ended it (SIGTERM)")
    run_on_node(
        folder,
        0,
        ["here"],
        7,
        stand_in("sys.exit(leave.parent.joinpath('run', 'left').exists())"),
    )
    assert read_job(folder).status is JobStatus.completed
    assert (folder / "attempt-1" / "run" / "left").exists()


def test_node_with_a_lone_failure_fails_its_task(
    running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exception on which the queue stops all nodes; the first node returns normally."""
    monkeypatch.setattr(nodes, "FIRST_NODE_SECONDS", 0.5)
    with pytest.raises(
        RuntimeError,
        match="node 1: its launcher ended with status 3; the first node continues",
    ):
        run_on_node(running, 1, ["n1", "n2"], 7, stand_in("sys.exit(3)"))
