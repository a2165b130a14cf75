"""Match combinations with the jobs already in a sweep's folder, and number new jobs.

Jobs with equal fingerprints are the same run. If only the words are equal, the code, PyTorch or the machine has
changed, so the earlier result is moved aside and the job runs again.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import is_locked

from .folder import JOBS_FOLDER, SWEEP_FILE, Job, JobStatus, Skipped, Sweep, is_sweep_dir, read_sweep, write_job
from .grid import Combination
from .runner import set_aside


@dataclass(frozen=True)
class Arrangement:
    """The jobs of a sweep, sorted by the work left."""

    jobs: list[Job]
    skipped: list[Skipped]
    to_run: list[Job]
    changed: list[Job]
    """Previous state of jobs that run again although their words are unchanged."""
    kept: list[Job]
    """Requested jobs that have ended already."""


def arrange(
    asked: Sequence[tuple[Combination, str]],
    refused: Sequence[Skipped],
    before: Sweep | None = None,
    *,
    retry: bool = False,
    queued: Collection[str] = (),
) -> Arrangement:
    """Number jobs, skip duplicates, and reuse the jobs of a folder.

    Args:
        asked: combinations with their fingerprints, in order.
        refused: combinations that cannot run.
        before: the folder's sweep; its other jobs are kept if they have started or are queued.
        retry: whether failed jobs run again.
        queued: names of jobs in a batch queue.
    """
    held = before.jobs if before is not None else []
    by_fingerprint = {job.fingerprint: job for job in held}
    wanted = {number for _, number in asked}
    by_words = {job.words: job for job in held if job.fingerprint not in wanted}
    jobs: dict[str, Job] = {}
    skipped = [*refused]
    to_run: list[Job] = []
    changed: list[Job] = []
    kept: list[Job] = []
    taken = _highest_number(before)
    for combination, number in asked:
        if number in jobs:
            reason = f"it is the same run as {jobs[number].name}"
            skipped.append(Skipped(combination.varied, reason))
            continue
        old = by_fingerprint.get(number)
        if old is not None:
            done = old.status.ended and not (retry and old.status is not JobStatus.done)
            # A job to run takes the validated words, not those recorded in the folder.
            words = old.words if done else combination.words
            job = dataclasses.replace(old, words=words, varied=combination.varied)
        else:
            old, done = by_words.pop(combination.words, None), False
            if old is None:
                taken += 1
                job = Job(f"{taken:02d}", combination.words, combination.varied, number)
            else:
                job = Job(old.name, combination.words, combination.varied, number)
                if old.status is not JobStatus.waiting:
                    changed.append(old)
        jobs[number] = job
        (kept if done else to_run).append(job)
    names = {job.name for job in jobs.values()}
    others = [
        job for job in held if job.name not in names and (job.status is not JobStatus.waiting or job.name in queued)
    ]
    every = sorted([*jobs.values(), *others], key=lambda job: int(job.name))
    return Arrangement(every, skipped, to_run, changed, kept)


def _highest_number(before: Sweep | None) -> int:
    """Return the highest job number of the folder, including dropped jobs, whose folders remain."""
    if before is None:
        return 0
    names = [*(job.name for job in before.jobs), *(path.name for path in (before.path / JOBS_FOLDER).glob("*"))]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def refuse_running(sweep: Sweep, queued: Collection[str]) -> None:
    """Reject resuming a sweep while another process runs a job other than those ``queued`` in a batch queue.

    Raises:
        ConfigError: naming the job.
    """
    for job in sweep.jobs:
        if job.status is JobStatus.running and job.name not in queued and is_locked(sweep.run_dir(job)):
            raise still_running(sweep, job)


def still_running(sweep: Sweep, job: Job) -> ConfigError:
    """The mistake of resuming a sweep while one of its jobs runs."""
    return ConfigError(f"job {job.name} of {sweep.path} is still running; wait for its end, or end it, then resume")


def write_arrangement(sweep: Sweep, arrangement: Arrangement, queued: Collection[str] = ()) -> None:
    """Write a sweep's folder and job files; move earlier results of jobs that run again aside.

    Folders of jobs ``queued`` in a batch queue are left alone.
    """
    for job in arrangement.changed:
        if job.name not in queued:
            set_aside(sweep.job_folder(job))
    to_run = {job.name for job in arrangement.to_run}
    for job in arrangement.jobs:
        if job.name in queued:
            continue
        again = job.name in to_run and job.status is not JobStatus.waiting
        waiting = dataclasses.replace(
            job, status=JobStatus.waiting, exit_status=None, reason=None, started_at=None, seconds=None
        )
        if again:
            set_aside(sweep.job_folder(job))
        write_job(sweep.job_folder(job), waiting if again else job)
    sweep.write()


def newest_with_words(folder: Path, words: Sequence[str]) -> Path | None:
    """Return the sweep folder below ``folder`` most recently started or resumed with the same words, or None."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_sweep_dir(path):
            try:
                same = list(read_sweep(path).words) == list(words)
            except ConfigError:
                continue
            if same:
                found.append(((path / SWEEP_FILE).stat().st_mtime, path))
    return max(found)[1] if found else None
