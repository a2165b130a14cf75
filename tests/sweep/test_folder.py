"""One job and its outcome; and sweep folders written by someone else."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdptoys.config.overrides import parse_overrides
from fsdptoys.errors import ConfigError
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep, read_sweep, runner
from fsdptoys.sweep.axes import Combination
from fsdptoys.sweep.folder import read_job, write_job
from fsdptoys.sweep.job_list import arrange
from fsdptoys.sweep.runner import handle_signals, quote, run_job
from fsdptoys.sweep.slurm_queue import read_submissions
from tests.sweep.jobs import STANDIN, once_ready


def make_job(folder: Path, how: int) -> Path:
    write_job(
        folder,
        Job(
            "01",
            (f"train.seed={how}", "train.steps=5"),
            {"train.seed": str(how)},
            "abc",
        ),
    )
    return folder


ENDS = {
    0: (JobStatus.completed, 0, None),
    1: (JobStatus.failed, 1, "rank 1 failed: RuntimeError: no"),
    2: (JobStatus.out_of_memory, 1, "rank 0 failed: host memory ran out on rank 0"),
    3: (
        JobStatus.out_of_memory,
        -9,
        "its launcher was killed, as by the system when host memory runs out",
    ),
    4: (JobStatus.failed, 7, "its launcher ended with status 7; see log.txt"),
    7: (JobStatus.stopped, 0, "SIGTERM requested the end"),
}


@pytest.mark.parametrize("how", ENDS)
def test_job_runs_with_its_arguments_and_its_end_is_judged(
    tmp_path: Path, how: int
) -> None:
    """Oracle: the arguments, then the run directory as Hydra's parser restores it; the scripted end
    of each process.

    The job's file agrees with the returned result.
    """
    folder = make_job(tmp_path / "it's, 1", how)
    job = run_job(folder, 60.0, train=STANDIN)
    assert (job.status, job.exit_status, job.reason) == ENDS[how]
    assert job.seconds is not None and job.started_at is not None
    assert read_job(folder) == job
    run_dir = str(folder / "run")
    override = f"metrics.run_dir={quote(run_dir)}"
    assert (
        folder / "log.txt"
    ).read_text() == f"words train.seed={how} train.steps=5 {override}\n"
    assert parse_overrides([override], {})[0].value() == run_dir


@pytest.mark.parametrize(("how", "grace_seconds"), [(5, 3600.0), (6, 0.0)])
def test_job_over_its_time_limit_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int, grace_seconds: float
) -> None:
    """Oracle: SIGHUP, then SIGKILL if that does not help; its process is gone. The clock passes the
    limit when the job runs."""
    ready = tmp_path / "01" / "ready"
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 10_000 * ready.exists(), sleep=time.sleep
    )
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "GRACE_SECONDS", grace_seconds)
    job = run_job(make_job(tmp_path / "01", how), 5000.0, train=STANDIN)
    assert job.status is JobStatus.timed_out
    assert job.exit_status == (-signal.SIGHUP if how == 5 else -signal.SIGKILL)
    assert job.reason == "it was ended after 5000 s, the time limit of a job"
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


def test_exception_of_the_caller_ends_the_job(tmp_path: Path) -> None:
    """Oracle: a batch system's handler may raise: the job is recorded as stopped, and the exception
    propagates."""
    folder = make_job(tmp_path / "01", 5)

    def leave(number: int, frame: object) -> None:
        raise TimeoutError

    alarm = once_ready(folder, lambda: os.kill(os.getpid(), signal.SIGALRM))
    with handle_signals({signal.SIGALRM: leave}), alarm, pytest.raises(TimeoutError):
        run_job(folder, None, train=STANDIN)
    assert read_job(folder).status is JobStatus.stopped


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two jobs and a skipped combination."""
    jobs = [
        Job("01", ("a=1",), {"a": "1"}, "f1"),
        Job("02", ("a=2",), {"a": "2"}, "f2", JobStatus.completed, 0, None, "t", 2.5),
    ]
    sweep = Sweep(
        tmp_path / "sweep",
        "title",
        "fsdptoys sweep",
        jobs,
        [Skipped({"a": "3"}, "why")],
        60.0,
        ("a=1,2",),
    )
    sweep.write()
    return sweep


def change(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("file", "key", "value", "reason"),
    [
        (
            "sweep.json",
            "jobs",
            ["../../elsewhere"],
            "'../../elsewhere' is no number of a job",
        ),
        ("sweep.json", "jobs", ["/etc"], "'/etc' is no number of a job"),
        ("sweep.json", "jobs", ["01", "01"], "it names a job twice"),
        ("sweep.json", "jobs", 1, "jobs is 1"),
        ("sweep.json", "time_limit_seconds", -1, "time_limit_seconds is -1"),
        ("jobs/01/job.json", "name", "..", "'..' is no number of a job"),
        ("jobs/01/job.json", "name", "02", "is the file of job 02"),
        ("jobs/01/job.json", "seconds", -3, "seconds is -3"),
        ("jobs/01/job.json", "more", 1, "the key 'more'"),
    ],
)
def test_hostile_file_is_reported_in_one_sentence(
    sweep: Sweep, file: str, key: str, value: Any, reason: str
) -> None:
    """Oracle: the expected message, on one line."""
    change(sweep.path / file, key, value)
    with pytest.raises(ConfigError) as caught:
        read_sweep(sweep.path)
    assert reason in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "{", "[]", '{"launcher": 1, "jobs": []}', None]
)
def test_hostile_submission_is_reported_in_one_sentence(
    sweep: Sweep, text: str | None
) -> None:
    """Oracle: the expected message, which names the file; None stands for a pipe without a
    writer."""
    path = sweep.path / "queue" / "1" / "jobs.json"
    path.parent.mkdir(parents=True)
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"jobs\.json cannot be read"):
        read_submissions(sweep)


def test_job_runs_with_the_validated_arguments(sweep: Sweep) -> None:
    """Oracle: the combination; the folder's own arguments would write elsewhere under the same
    fingerprint."""
    change(
        sweep.job_folder(sweep.jobs[0]) / "job.json",
        "words",
        ["a=1", "checkpoint.folder=/elsewhere"],
    )
    combinations = [
        (Combination(("a=1",), {"a": "1"}), "f1"),
        (Combination(("a=2",), {"a": "2"}), "f2"),
    ]
    arrangement = arrange(combinations, [], read_sweep(sweep.path))
    assert [job.overrides for job in arrangement.to_run] == [("a=1",)]


@pytest.mark.parametrize("folder", ["jobs", "jobs/02"])
def test_link_out_of_the_folder_is_refused(
    sweep: Sweep, folder: str, tmp_path: Path
) -> None:
    """Oracle: the message; a resumed job would write at the link's end."""
    linked = sweep.path / folder
    elsewhere = tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    with pytest.raises(
        ConfigError,
        match=rf"{folder} is a link, through which a sweep would write elsewhere; put ",
    ):
        read_sweep(sweep.path)


def test_files_of_earlier_attempts_are_moved_aside(tmp_path: Path) -> None:
    """Oracle: log, run directory and outcome of each earlier attempt, with the file that records
    its end."""
    folder = make_job(tmp_path / "01", 1)
    for _ in range(3):
        run_job(folder, None, train=STANDIN)
    for name in ("attempt-1", "attempt-2"):
        assert sorted(path.name for path in (folder / name).iterdir()) == [
            "job.json",
            "log.txt",
            "outcome.json",
            "run",
        ]
        assert (
            json.loads((folder / name / "job.json").read_text())["status"] == "failed"
        )
    assert not (folder / "attempt-3").exists()
    assert (folder / "run").is_dir()


def test_symbolic_link_in_place_of_a_temporary_file_is_replaced(sweep: Sweep) -> None:
    """Oracle: the content of the link's target and the sweep read back."""
    precious = sweep.path / "precious"
    precious.write_text("precious")
    (sweep.path / f".sweep.json.{os.getpid()}.part").symlink_to(precious)
    sweep.write()
    assert read_sweep(sweep.path) == sweep and not list(sweep.path.glob(".*.part"))
    assert (
        precious.read_text() == "precious"
        and read_job(sweep.job_folder(sweep.jobs[0])).name == "01"
    )
