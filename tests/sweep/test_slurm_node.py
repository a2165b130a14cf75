"""Jobs of a batch queue: one node's part, and whole jobs.

SLURM itself is used if present (``sinfo`` answers); everywhere, submitit's local launcher starts
real processes through the same plugin.
"""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.cli.sweep import sweep_command
from fsdptoys.errors import ConfigError
from fsdptoys.sweep import runner
from fsdptoys.sweep import slurm_node as nodes
from fsdptoys.sweep import slurm_submit as submitting
from fsdptoys.sweep.folder import Job, JobStatus, Sweep, read_job, read_sweep, write_job
from fsdptoys.sweep.slurm_node import run_on_node
from fsdptoys.sweep.slurm_queue import jobs_in_queue
from fsdptoys.sweep.slurm_settings import LOCAL, read_launcher
from fsdptoys.sweep.slurm_submit import submit
from fsdptoys.utils.file_lock import is_locked
from fsdptoys.utils.regular_file import read_regular
from tests.harness.levels import extended
from tests.sweep.jobs import (
    ENDS_WELL_WHEN_ASKED,
    ON_SLURM,
    TINY,
    make_sweep,
    once_ready,
    stand_in,
)

BEFORE_LIMIT = "as it does before its own time limit"


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (
            signal.SIGUSR1,
            JobStatus.timed_out,
            f"the queue asked it to end (SIGUSR1), {BEFORE_LIMIT}",
        ),
        (
            signal.SIGUSR2,
            JobStatus.timed_out,
            f"the queue asked it to end (SIGUSR2), {BEFORE_LIMIT}",
        ),
        (signal.SIGTERM, JobStatus.stopped, "the queue ended it (SIGTERM)"),
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
    folder = make_sweep(tmp_path, [()]).path / "jobs/01"
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
    assert (job.status, job.reason, job.exit_status) == (status, reason, 0)


def test_nodes_rendezvous_at_the_first_which_alone_writes_the_job_file(
    tmp_path: Path,
) -> None:
    """Oracle: the arguments that two nodes' launchers received, and the single job file."""
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
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
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
    record = {
        "status": 1,
        "reason": "rank 1 was ended by SIGKILL",
        "out_of_memory": True,
    }
    (folder / "outcome-node1-6.json").write_text(
        json.dumps({"status": 1, "reason": "an earlier start's"})
    )
    (folder / "outcome-node1-7.json").write_text(
        json.dumps({"status": 1, "reason": "an earlier start's"})
    )
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
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
    write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.running))
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
            write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.timed_out))
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
    folder = make_sweep(tmp_path, [()]).path / "jobs/01"
    completed = Job("01", TINY, {}, "run 1", JobStatus.completed)
    write_job(folder, completed)
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
    folder = make_sweep(tmp_path, [()]).path / "jobs/01"
    (folder / "run").mkdir()
    (folder / "run" / "left").touch()
    write_job(
        folder,
        Job(
            "01",
            TINY,
            {},
            "run 1",
            JobStatus.stopped,
            reason="the queue ended it (SIGTERM)",
        ),
    )
    run_on_node(
        folder,
        0,
        ["here"],
        7,
        stand_in("sys.exit(leave.parent.joinpath('run', 'left').exists())"),
    )
    assert read_job(folder).status is JobStatus.completed
    assert (folder / "attempt-1" / "run" / "left").exists()


class ForkingPlugin:
    """Starts a job's task as the plugin's local launcher does, but with a stand-in for the
    training, and waits."""

    def __init__(self, sweep: Sweep, command: tuple[str, ...], folder: Path) -> None:
        self._sweep = sweep
        self._command = command
        self._folder = folder

    def launch(self, overrides: Sequence[Sequence[str]], first: int) -> list[object]:
        """Run the single submitted job."""
        ((word,),) = overrides
        folder = self._sweep.path.absolute() / word.partition("=")[2]
        arguments = (folder, 0, ["here"], 7, self._command)
        task = multiprocessing.get_context("fork").Process(
            target=run_on_node, args=arguments
        )
        task.start()
        submitted = self._folder / str(task.pid)
        submitted.mkdir(parents=True)
        (submitted / f"{task.pid}_submitted.pkl").touch()
        task.join()
        return [None]


ENDS_OF_SIGINT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave.with_name("ready").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("number", "command"),
    [
        pytest.param(signal.SIGINT, ENDS_WELL_WHEN_ASKED, id="SIGINT"),
        extended(signal.SIGTERM, ENDS_WELL_WHEN_ASKED, id="SIGTERM"),
        extended(signal.SIGHUP, ENDS_OF_SIGINT, id="SIGHUP"),
    ],
)
def test_local_job_ends_with_the_command_that_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    command: str,
) -> None:
    """Oracle: status, file and locks of the job's folder, after a real signal; a second job is
    unchanged."""
    read_launcher.cache_clear()
    monkeypatch.setattr(
        submitting,
        "_make_launcher",
        lambda sweep, launcher, options: ForkingPlugin(
            sweep, stand_in(command), Path(options["submitit_folder"]).parent
        ),
    )
    path = tmp_path / "sweep"
    folder = path / "jobs/01"
    argv = (
        *TINY,
        "train.seed=1,2",
        "launch.nproc_per_node=1",
        f"hydra/launcher={LOCAL}",
        "--out",
        str(path),
    )
    with once_ready(folder, lambda: os.kill(os.getpid(), number)):
        assert sweep_command(argv) == 128 + number
    assert [job.status for job in read_sweep(path).jobs] == [
        JobStatus.stopped,
        JobStatus.waiting,
    ]
    assert not is_locked(folder)


def test_local_jobs_use_the_plugin_and_failures_do_not_stop_others(
    tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: real runs in submitit's processes: one that its launcher refuses, and one that
    succeeds."""
    read_launcher.cache_clear()
    sweep = make_sweep(
        tmp_path / "a sweep", [("train.seq_len=0",), ("parallel=single",)]
    )
    after: list[str] = []
    submit(
        sweep,
        sweep.jobs,
        [f"hydra/launcher={LOCAL}", "hydra.launcher.timeout_min=9"],
        lambda: after.append("job"),
    )
    first, second = read_sweep(sweep.path).jobs
    assert (first.status, first.exit_status) == (JobStatus.failed, 2)
    assert first.reason is not None and first.reason.startswith(
        "train.seq_len=0 must be at least 1"
    )
    assert second.status is JobStatus.completed, (
        sweep.job_folder(second) / "log.txt"
    ).read_text()
    assert (sweep.run_dir(second) / "metrics.jsonl").read_text().count("\n") == 2
    assert after == ["job", "job"]
    assert "02 done after" in capsys.readouterr().out


def _idle_nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    answer = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True
    )
    return (
        sum(int(line) for line in answer.stdout.split())
        if answer.returncode == 0
        else 0
    )


def test_slurm_runs_a_job_on_all_its_nodes(tmp_path: Path, unmeasured: None) -> None:
    """Oracle: a real SLURM: two nodes if two are free, and a partition that does not exist.

    FSDPTOYS_SHARED_FOLDER names a folder visible to all nodes, if they do not share the temporary
    folder.
    """
    free = _idle_nodes()
    if not free:
        pytest.skip("no SLURM with an idle node answers here")
    read_launcher.cache_clear()
    count = min(free, 2)
    shared = (
        Path(os.environ.get("FSDPTOYS_SHARED_FOLDER", tmp_path))
        / f"sweep-{os.getpid()}"
    )
    sweep = make_sweep(
        shared, [(f"launch.nnodes={count}", "launch.nproc_per_node=1", "parallel=ddp")]
    )
    overrides = [
        ON_SLURM,
        "hydra.launcher.timeout_min=10",
        "hydra.launcher.signal_delay_s=60",
    ]
    with pytest.raises(ConfigError, match=r"refuses the jobs \(.*partition"):
        submit(
            sweep,
            sweep.jobs,
            [*overrides, "hydra.launcher.partition=no-such-partition"],
        )
    submit(sweep, sweep.jobs, overrides)
    (job,) = read_sweep(sweep.path).jobs
    assert job.status is JobStatus.completed, (
        job,
        (sweep.job_folder(job) / "log.txt").read_text(),
    )
    environment = json.loads((sweep.run_dir(job) / "environment.json").read_text())
    assert environment["world_size"] == count
    assert jobs_in_queue(read_sweep(sweep.path)) == {}


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
