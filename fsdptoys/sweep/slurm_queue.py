"""A sweep's jobs in a batch queue: submissions, ids and states.

    queue/1/jobs.json            one submission: its launcher, and names of jobs in order
    queue/1/123_0/…              submitit's files of its first job, under the queue's id
    queue/1/123_0/123_0_0_log.err

Ids are read from submitit's folder names, which exist as soon as the queue has accepted the jobs,
so that a submitting command may be killed at any moment. States come from ``squeue``, which needs
no accounting database; it forgets a job some minutes after its end (``MinJobAge``), so a forgotten
job has ended.

Not covered: other schedulers. For submitit's local processes the lock on a job's folder is enough.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.file_lock import is_locked
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .folder import JOBS_FOLDER, Job, JobStatus, Sweep, read_job, write_job
from .runner import describe_end, print_line

SLURM = "submitit_slurm"
"""``hydra/launcher=`` of SLURM jobs."""

QUEUE_FOLDER = "queue"
SUBMISSION_FILE = "jobs.json"
LARGEST_FILE_BYTES = 2**20
ANSWER_SECONDS = 60
"""Timeout of ``squeue``."""

ASK_EVERY_SECONDS = 30.0
HURRY_SECONDS = 5.0
"""Interval of polling the queue; the second once the plugin has stopped waiting."""

POLL_SECONDS = 1.0
"""Interval of polling the jobs' folders."""

ENDED_STATES = {
    "CANCELLED": JobStatus.stopped,
    "PREEMPTED": JobStatus.stopped,
    "TIMEOUT": JobStatus.timed_out,
    "DEADLINE": JobStatus.timed_out,
    "OUT_OF_MEMORY": JobStatus.out_of_memory,
    "NODE_FAIL": JobStatus.stopped,
    "BOOT_FAIL": JobStatus.stopped,
    "FAILED": JobStatus.failed,
    "COMPLETED": JobStatus.failed,
}
"""SLURM's final state → status of a job that recorded no outcome."""


@dataclass
class Submission:
    """Jobs submitted together; the fields before ``folder`` are its file's."""

    launcher: str
    """Value of ``hydra/launcher=``."""
    jobs: tuple[str, ...]
    """Names, in the queue's order."""
    folder: Path = field(default=Path(), init=False)
    thread: threading.Thread | None = field(default=None, init=False)
    """Thread inside the plugin, which waits for the jobs; None for another command's submission."""
    error: BaseException | None = field(default=None, init=False)
    """The plugin's exception."""

    @property
    def is_over(self) -> bool:
        """Whether the plugin has stopped waiting."""
        return self.thread is not None and not self.thread.is_alive()

    def ids(self) -> dict[str, str]:
        """Return job → queue id of the accepted jobs."""
        ids: dict[int, str] = {}
        for path in self.folder.glob("*/*_submitted.pkl"):
            identity = re.fullmatch(r"[0-9]+(?:_([0-9]+))?", path.parent.name)
            if identity and path.name == f"{identity[0]}_submitted.pkl":
                ids[int(identity[1] or 0)] = identity[0]
        return {job: ids[index] for index, job in enumerate(self.jobs) if index in ids}

    def log(self, job: str) -> Path:
        """Return the stderr log of a job's first task, or the submission's folder if the job has no
        id."""
        identity = self.ids().get(job)
        return (
            self.folder / identity / f"{identity}_0_log.err"
            if identity
            else self.folder
        )


def begin_submission(sweep: Sweep, launcher: str, jobs: Sequence[Job]) -> Submission:
    """Make the folder of a new submission."""
    parent = sweep.path.absolute() / QUEUE_FOLDER
    numbers = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    folder = parent / str(max(numbers, default=0) + 1)
    folder.mkdir(parents=True)
    submission = Submission(launcher, tuple(job.name for job in jobs))
    submission.folder = folder
    write_atomically(
        folder / SUBMISSION_FILE,
        json.dumps({"launcher": launcher, "jobs": submission.jobs}) + "\n",
    )
    return submission


def read_submissions(sweep: Sweep) -> list[Submission]:
    """Read a sweep's submissions, oldest first.

    Raises:
        ConfigError: if a file cannot be read.
    """
    files = [
        path
        for path in (sweep.path / QUEUE_FOLDER).glob(f"*/{SUBMISSION_FILE}")
        if path.parent.name.isdecimal()
    ]
    submissions = []
    for path in sorted(files, key=lambda path: int(path.parent.name)):
        try:
            submissions.append(
                build(Submission, parse_json(read_regular(path, LARGEST_FILE_BYTES)))
            )
        except (OSError, ValueError) as mistake:
            raise ConfigError(
                f"{path} cannot be read ({one_line(mistake)}), and lists jobs that a queue may "
                f"still run; remove {path.parent} when none of them runs"
            ) from mistake
        submissions[-1].folder = path.parent
    return submissions


def jobs_in_queue(sweep: Sweep) -> dict[str, str]:
    """Return job → id of queued or running jobs, which must not be started again.

    The id is empty for a job known only by the lock on its folder.

    Raises:
        ConfigError: if SLURM was given jobs that have not ended, and ``squeue`` does not answer.
    """
    ids = {
        name: identity
        for submission in read_submissions(sweep)
        if submission.launcher == SLURM
        for name, identity in submission.ids().items()
    }
    locked = {job.name: "" for job in sweep.jobs if is_locked(sweep.job_folder(job))}
    pending = {
        job.name: ids[job.name]
        for job in sweep.jobs
        if job.name in ids and not job.status.ended
    }
    if not pending:
        return locked
    states = ask_queue(pending.values())
    if states is None:
        names = ", ".join(pending)
        raise ConfigError(
            f"{sweep.path} has jobs submitted to SLURM that may still run ({names}), and squeue "
            "does not answer here; resume on a login node of that cluster"
        )
    return locked | {
        name: identity
        for name, identity in pending.items()
        if in_queue(states, identity)
    }


def in_queue(states: dict[str, str], identity: str) -> bool:
    """Return whether a job is queued or running."""
    return identity in states and states[identity] not in ENDED_STATES


def ask_queue(ids: Iterable[str]) -> dict[str, str] | None:
    """Return id → state of the jobs that SLURM remembers; None if ``squeue`` fails."""
    arrays = sorted({identity.partition("_")[0] for identity in ids})
    if shutil.which("squeue") is None:
        return None
    # squeue fails if its only id is forgotten; then the user's full queue is read.
    base = ["squeue", "--noheader", "--states=all", "--array", "--format=%i %T"]
    for which in (f"--jobs={','.join(arrays)}", "--me"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.check_output(
                [*base, which],
                stderr=subprocess.PIPE,
                text=True,
                timeout=ANSWER_SECONDS,
            )
            pairs = (line.split() for line in answer.splitlines())
            return {
                pair[0]: pair[1]
                for pair in pairs
                if len(pair) == 2 and re.match(r"\d", pair[0])
            }
    return None


def still_queued(sweep: Sweep, queued: Mapping[str, str]) -> dict[str, Submission]:
    """Return job → submission of earlier commands' jobs that are still ``queued``, the result of
    :func:`jobs_in_queue`."""
    return {
        name: submission
        for submission in read_submissions(sweep)
        for name, identity in submission.ids().items()
        if queued.get(name) == identity
    }


def watch_jobs(
    sweep: Sweep, submissions: Mapping[str, Submission], after_job: Callable[[], None]
) -> None:
    """Watch jobs through their folders until all have ended; record an outcome for jobs that wrote
    none.

    Args:
        submissions: job → its submission.
        after_job: called after the end of each job.
    """
    open_jobs = dict(submissions)
    printed = dict.fromkeys(open_jobs, JobStatus.waiting)
    absences = dict.fromkeys(open_jobs, 0)
    states: dict[str, str] = {}
    asked_at = time.monotonic()
    while open_jobs:
        hurry = any(submission.is_over for submission in open_jobs.values())
        if time.monotonic() - asked_at > (
            HURRY_SECONDS if hurry else ASK_EVERY_SECONDS
        ):
            asked_at = time.monotonic()
            ids = {
                name: submission.ids().get(name, "")
                for name, submission in open_jobs.items()
                if submission.launcher == SLURM
            }
            answer = ask_queue(ids.values()) if ids else None
            if answer is not None:
                states = answer
                for name, identity in ids.items():
                    absences[name] = (
                        0 if in_queue(states, identity) else absences[name] + 1
                    )
        for name, submission in list(open_jobs.items()):
            # A node's files may appear here with a delay, so the queue is asked twice.
            gone = submission.is_over
            if submission.launcher == SLURM:
                gone = absences[name] >= 2
            folder = sweep.path / JOBS_FOLDER / name
            job = read_job(folder)
            if gone and job.status in (JobStatus.waiting, JobStatus.running):
                job = _close(folder, job, states, submission)
            # While its node holds the lock, the reason may still change with the other nodes'
            # outcomes.
            settled = job.status.ended and not is_locked(folder)
            if job.status is not printed[name] and (settled or not job.status.ended):
                printed[name] = job.status
                runs = job.status is JobStatus.running
                text = f"runs {job.label}" if runs else describe_end(sweep, job)
                print_line(f"{name} {text}")
            if settled or gone:
                del open_jobs[name]
                after_job()
        if open_jobs:
            time.sleep(POLL_SECONDS)


def _close(
    folder: Path, job: Job, states: Mapping[str, str], submission: Submission
) -> Job:
    """Record the outcome of a job that left the queue without recording one."""
    state = states.get(submission.ids().get(job.name, ""))
    how = f"SLURM says {state}" if state else "it has left the queue"
    status = JobStatus.stopped if submission.launcher == SLURM else JobStatus.failed
    closed = dataclasses.replace(
        job,
        status=ENDED_STATES.get(state or "", status),
        exit_status=None,
        reason=f"it ended without recording an outcome ({how}); see {submission.log(job.name)}",
    )
    write_job(folder, closed)
    return closed


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
