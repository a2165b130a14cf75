"""Match combinations with the jobs already in a sweep's folder, and number new jobs.

Jobs with equal fingerprints are the same run. If only the overrides are equal, the code, PyTorch
or the machine has changed: the earlier result is moved aside, and the job runs again.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdptoys.errors import ConfigError

from .axes import Combination
from .folder import JOBS_FOLDER, Job, JobStatus, Skipped, Sweep, write_job
from .runner import set_aside


@dataclass(frozen=True)
class Arrangement:
    """The jobs of a sweep, sorted by the work left."""

    jobs: list[Job]
    skipped: list[Skipped]
    to_run: list[Job]
    changed: list[Job]
    """Previous state of jobs that run again although their overrides are unchanged."""
    ended: list[Job]
    """Requested jobs that have ended already."""


def arrange(
    combinations: Sequence[tuple[Combination, str]],
    refused: Sequence[Skipped],
    before: Sweep | None = None,
    *,
    retry: bool = False,
    queued: Collection[str] = (),
) -> Arrangement:
    """Number jobs, skip duplicates, and reuse the jobs of a folder.

    Args:
        combinations: with their fingerprints, in order.
        refused: combinations that cannot run.
        before: the folder's sweep; its other jobs are kept if they have started or are queued.
        retry: whether failed jobs run again.
        queued: names of jobs in a batch queue.
    """
    earlier = before.jobs if before is not None else []
    by_fingerprint = {job.fingerprint: job for job in earlier}
    fingerprints = {number for _, number in combinations}
    by_overrides = {
        job.overrides: job for job in earlier if job.fingerprint not in fingerprints
    }
    result = Arrangement([], [*refused], [], [], [])
    jobs: dict[str, Job] = {}
    # Dropped jobs have folders, too.
    folders = (before.path / JOBS_FOLDER).glob("*") if before is not None else ()
    last_number = max(
        (int(path.name) for path in folders if path.name.isdecimal()), default=0
    )
    for combination, number in combinations:
        if number in jobs:
            result.skipped.append(
                Skipped(
                    combination.varied, f"it is the same run as {jobs[number].name}"
                )
            )
            continue
        old = by_fingerprint.get(number)
        is_reused = False
        if old is not None:
            is_reused = old.status.ended and not (
                retry and old.status is not JobStatus.completed
            )
            # A job to run takes the validated overrides, not those recorded in the folder.
            overrides = old.overrides if is_reused else combination.overrides
            job = dataclasses.replace(
                old, overrides=overrides, varied=combination.varied
            )
        else:
            old = by_overrides.pop(combination.overrides, None)
            last_number += old is None
            name = f"{last_number:02d}" if old is None else old.name
            job = Job(name, combination.overrides, combination.varied, number)
            if old is not None and old.status is not JobStatus.waiting:
                result.changed.append(old)
        jobs[number] = job
        (result.ended if is_reused else result.to_run).append(job)
    names = {job.name for job in jobs.values()}
    others = (
        job
        for job in earlier
        if job.status is not JobStatus.waiting or job.name in queued
    )
    every = [*jobs.values(), *(job for job in others if job.name not in names)]
    result.jobs.extend(sorted(every, key=lambda job: int(job.name)))
    return result


def still_running(sweep: Sweep, job: Job) -> ConfigError:
    """Return the mistake of resuming a sweep while one of its jobs runs."""
    return ConfigError(
        f"job {job.name} of {sweep.path} is still running; wait for its end, or end it, then resume"
    )


def write_arrangement(
    sweep: Sweep, arrangement: Arrangement, queued: Collection[str] = ()
) -> None:
    """Write a sweep's folder and job files; move earlier results of jobs that run again aside.

    Folders of jobs ``queued`` in a batch queue are left alone.
    """
    to_run = {job.name for job in arrangement.to_run}
    for job in arrangement.jobs:
        if job.name in queued:
            continue
        if job.name in to_run:
            set_aside(sweep.job_folder(job))
            job = job.restarted()
        write_job(sweep.job_folder(job), job)
    sweep.write()
