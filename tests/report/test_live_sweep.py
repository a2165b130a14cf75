"""Following a sweep, or one of its jobs, from outside."""

import dataclasses
from pathlib import Path

import pytest

from fsdptoys.sweep import Job, JobStatus, Sweep
from fsdptoys.sweep.folder import write_job
from tests.report.watched_runs import Watching, WrittenRun, step_of


def sweep_of(path: Path, statuses: list[JobStatus]) -> Sweep:
    """A sweep's folder with jobs in the given states."""
    jobs = [
        Job(f"{number:02}", ("train.steps=20",), {"parallel": name}, name, status)
        for number, (name, status) in enumerate(
            zip(("fsdp1", "fsdp2"), statuses, strict=False), 1
        )
    ]
    sweep = Sweep(path, "debug", "fsdptoys sweep debug", jobs, [], None)
    sweep.write()
    return sweep


def test_sweep_is_followed_job_by_job(tmp_path: Path) -> None:
    """Oracle: the jobs' own steps in their order, the end of each, and the count at the end."""
    sweep = sweep_of(tmp_path / "sweep", [JobStatus.running, JobStatus.waiting])
    first, second = sweep.jobs
    watching = Watching(sweep.path)
    watching.wait_for_text("job 01 of 2, parallel=fsdp1: ")
    run = WrittenRun(sweep.run_dir(first))
    run.add(step_of(1))
    watching.wait_for_text("step  1/20")
    run.finish()
    write_job(
        sweep.job_folder(first), dataclasses.replace(first, status=JobStatus.completed)
    )
    watching.wait_for_text("job 01 of 2, parallel=fsdp1: done")
    watching.wait_for_text("no job is running: 1 waiting, 1 done")
    write_job(
        sweep.job_folder(second), dataclasses.replace(second, status=JobStatus.running)
    )
    run = WrittenRun(sweep.run_dir(second))
    run.add(step_of(1), step_of(2))
    watching.wait_for_text("job 02 of 2, parallel=fsdp2: ")
    watching.wait_for_text("step  2/20")
    run.die()
    write_job(
        sweep.job_folder(second),
        dataclasses.replace(second, status=JobStatus.failed, reason="rank 1 failed"),
    )
    assert watching.end() == 0
    assert watching.lines()[-2:] == [
        "job 02 of 2, parallel=fsdp2: failed: rank 1 failed",
        f"the sweep has ended: 1 done, 1 failed; {sweep.path}",
    ]


@pytest.mark.parametrize(
    ("status", "exit_status"), [(JobStatus.completed, 0), (JobStatus.out_of_memory, 1)]
)
def test_single_job_of_a_sweep_is_followed(
    tmp_path: Path, status: JobStatus, exit_status: int
) -> None:
    """Oracle: the end recorded in the job's own file."""
    sweep = sweep_of(tmp_path / "sweep", [JobStatus.waiting])
    (job,) = sweep.jobs
    watching = Watching(sweep.job_folder(job))
    watching.wait_for_text("waits to start")
    write_job(sweep.job_folder(job), dataclasses.replace(job, status=status))
    assert watching.end() == exit_status
    assert watching.lines()[-1] == status.value
