"""Run the jobs of a sweep on this machine, one after another, printing a line when each begins and ends."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence

from fsdptoys.errors import ConfigError
from fsdptoys.train.recorded_run import is_run_dir, read_recorded_run
from fsdptoys.utils.text import printable

from .folder import LOG_FILE, Job, JobStatus, Sweep
from .runner import TRAIN, Interruption, run_job


def run_jobs(
    sweep: Sweep, jobs: Sequence[Job], after_job: Callable[[], None], *, train: Sequence[str] = TRAIN
) -> int | None:
    """Run jobs of a sweep until all have ended or a signal interrupts.

    Args:
        sweep: the sweep; the caller holds its folder's lock.
        jobs: its jobs to run, in order.
        after_job: called after each job, whatever its outcome.
        train: the command of a job, before its words.

    Returns:
        Number of the interrupting signal, or None.
    """
    seconds: list[float] = []
    with Interruption() as interruption:
        for index, job in enumerate(jobs, start=1):
            print_status(f"[{index}/{len(jobs)}] {job.name} {job.label}")
            folder = sweep.job_folder(job)
            job = run_job(folder, sweep.time_limit_seconds, interruption=interruption, train=train)
            after_job()
            seconds.append(job.seconds or 0.0)
            message = describe_end(sweep, job)
            left = len(jobs) - index
            if left and interruption.number is None:
                message += f"; about {duration(left * sum(seconds) / len(seconds))} left"
            print_status(f"[{index}/{len(jobs)}] {job.name} {message}")
            if interruption.number is not None:
                break
    return interruption.number


def print_status(text: str) -> None:
    """Print a line; a closed terminal is ignored, so that jobs and tables continue."""
    try:
        print(printable(text, sys.stdout), flush=True)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EPIPE):
            # Otherwise Python flushes the stream again at exit, and exits with status 120.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def describe_end(sweep: Sweep, job: Job) -> str:
    """Describe a job's outcome in one line."""
    seconds = duration(job.seconds or 0.0)
    if job.status is not JobStatus.done:
        log = sweep.job_folder(job) / LOG_FILE
        where = f" ({log})" if job.status in (JobStatus.failed, JobStatus.out_of_memory) else ""
        return f"{job.status.value} after {seconds}: {job.reason}{where}"
    return ", ".join([f"done in {seconds}", *_numbers(sweep, job)])


def duration(seconds: float) -> str:
    """Format a duration: 8.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _numbers(sweep: Sweep, job: Job) -> list[str]:
    """Return the recorded step time, peak memory and loss of a finished job."""
    run_dir = sweep.run_dir(job)
    try:
        results = read_recorded_run(run_dir).results if is_run_dir(run_dir) else None
    except ConfigError:
        results = None
    if results is None:
        return []
    parts = []
    if results.step_time_seconds is not None:
        parts.append(f"{results.step_time_seconds.median:.3g} s a step")
    if results.memory_peak_gib is not None:
        parts.append(f"{results.memory_peak_gib:.2f} GiB at the peak")
    elif results.resident_set_peak_gib is not None:
        parts.append(f"{results.resident_set_peak_gib:.2f} GiB of host memory at the peak")
    if results.last_loss is not None:
        parts.append(f"loss {results.last_loss:.4f}")
    return parts
