"""Run jobs of a sweep on this machine, each in its own processes, so that no failure of a job ends
the sweep.

A job is a ``fsdptoys train`` in its own session, so that Ctrl-C reaches only the sweep. The sweep
ends a job by SIGHUP, on which a launcher ends all its ranks at once, then by SIGKILL. If the sweep
itself is killed, Linux sends SIGHUP to the job.

Signal handlers (Ctrl-C, a batch system, a closed terminal) only record the request, which the sweep
polls: an exception raised in a handler could interrupt a file being written.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import IO

from fsdptoys.launch.exit_record import (
    EXIT_RECORD_VARIABLE,
    ExitRecord,
    read_exit_record,
)
from fsdptoys.train.stop import SAME_REQUEST_SECONDS
from fsdptoys.utils.parent_death import end_with_parent
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.signal_handlers import handle_signals
from fsdptoys.utils.text import duration_text, printable

from .folder import (
    JOB_FILE,
    LOG_FILE,
    RUN_FOLDER,
    Job,
    JobStatus,
    Sweep,
    read_job,
    write_job,
)

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[int]:
    """Return the stop signals, without those ignored since the start: by nohup, or a shell for
    background jobs."""
    return [
        number
        for number in END_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    ]


class Interruption(contextlib.ExitStack):
    """Records stop signals while the context is entered; main thread only."""

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        """Number of the first signal, or None."""
        self.at_once = False
        """Whether there was a second request."""
        self.process: int | None = None
        """Process id of the running launcher, for subclasses that forward signals."""
        self._first = 0.0

    def __enter__(self) -> "Interruption":
        self.enter_context(handle_signals(dict.fromkeys(heeded_signals(), self._note)))
        return self

    def watch(self, process: int) -> None:
        """Set the process id of the launcher that has started."""
        self.process = process

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number = number
            self._first = now
        elif number == signal.SIGINT or now - self._first >= SAME_REQUEST_SECONDS:
            self.at_once = True  # sooner: one request forwarded by several processes


TRAIN = (sys.executable, "-m", "fsdptoys", "train")

OUTCOME_FILE = "outcome.json"
"""File in a job's folder with the launcher's own account of its outcome."""

END_JOB = signal.SIGHUP
"""Ends a launcher and all its ranks at once, without a last checkpoint. No terminal sends it to a
job's session."""

GRACE_SECONDS = 15.0
"""A launcher still running so long after ``END_JOB`` is killed; it gives its ranks 5 seconds."""

POLL_SECONDS = 0.1


def run_jobs(
    sweep: Sweep,
    jobs: Sequence[Job],
    after_job: Callable[[], None],
    *,
    train: Sequence[str] = TRAIN,
) -> int | None:
    """Run jobs of a sweep until all have ended or a signal interrupts.

    Args:
        sweep: the sweep; the caller holds its folder's lock.
        jobs: its jobs to run, in order.
        after_job: called after each job, whatever its outcome.
        train: the command of a job, before its overrides.

    Returns:
        Number of the interrupting signal, or None.
    """
    with Interruption() as interruption:
        for index, job in enumerate(jobs, start=1):
            print_line(f"[{index}/{len(jobs)}] {job.name} {job.label}")
            folder = sweep.job_folder(job)
            job = run_job(
                folder, sweep.time_limit_seconds, interruption=interruption, train=train
            )
            after_job()
            print_line(f"[{index}/{len(jobs)}] {job.name} {describe_end(sweep, job)}")
            if interruption.number is not None:
                break
    return interruption.number


def run_job(
    folder: Path,
    time_limit_seconds: float | None,
    *,
    interruption: Interruption | None = None,
    train: Sequence[str] = TRAIN,
) -> Job:
    """Run the job of a folder and record its outcome; files of an earlier attempt are moved aside.

    Args:
        folder: the job's folder, with its ``job.json``.
        time_limit_seconds: the job is ended after this time; None for no limit.
        interruption: polled for a request to end the job; None where an exception requests it
            instead.
        train: the command, before the job's overrides.

    Returns:
        The ended job.
    """
    folder = folder.absolute()
    interruption = interruption or Interruption()
    set_aside(folder)
    started = time.monotonic()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = dataclasses.replace(
        read_job(folder).restarted(), status=JobStatus.running, started_at=now
    )
    write_job(folder, job)
    with open_regular(folder / LOG_FILE, "wb") as log:
        process = start_launcher(
            folder, [*train, *job.overrides], folder / OUTCOME_FILE, log
        )
        interruption.watch(process.pid)
        limit = math.inf if time_limit_seconds is None else time_limit_seconds
        try:
            ended_for, exit_status = _wait(process, started + limit, interruption)
        except BaseException:
            end_launcher(process)
            write_job(
                folder,
                _closed(
                    job,
                    started,
                    process.returncode,
                    JobStatus.stopped,
                    "the sweep was ended",
                ),
            )
            raise
        finally:
            interruption.process = None
    reason = "the sweep was ended"
    if ended_for is None:
        ended_for, reason = _judge(exit_status, read_exit_record(folder / OUTCOME_FILE))
    elif ended_for is JobStatus.timed_out:
        reason = f"it was ended after {time_limit_seconds:g} s, the time limit of a job"
    job = _closed(job, started, exit_status, ended_for, reason)
    write_job(folder, job)
    return job


def start_launcher(
    folder: Path, command: Sequence[str], exit_record: Path, log: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start the launcher of the job in a (absolute) folder, with its output in ``log``, in its own
    session."""
    return subprocess.Popen(
        [*command, f"metrics.run_dir={quote(str(folder / RUN_FOLDER))}"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, EXIT_RECORD_VARIABLE: str(exit_record)},
        start_new_session=True,
        preexec_fn=_ended_with_parent(),
    )


def _judge(exit_status: int, outcome: ExitRecord | None) -> tuple[JobStatus, str]:
    """Return the status and reason of a job not ended by the sweep, from its launcher's exit status
    and record."""
    if outcome is not None and outcome.stopped_by is not None:
        return JobStatus.stopped, f"{outcome.stopped_by} requested the end"
    if exit_status == 0:
        return JobStatus.completed, ""
    if exit_status == -signal.SIGKILL:
        return (
            JobStatus.out_of_memory,
            "its launcher was killed, as by the system when host memory runs out",
        )
    if exit_status < 0:
        return (
            JobStatus.failed,
            f"its launcher was ended by {signal.Signals(-exit_status).name}",
        )
    if outcome is None or outcome.reason is None:
        return (
            JobStatus.failed,
            f"its launcher ended with status {exit_status}; see {LOG_FILE}",
        )
    return (
        JobStatus.out_of_memory if outcome.out_of_memory else JobStatus.failed,
        outcome.reason,
    )


def set_aside(folder: Path) -> None:
    """Move the files of a job's earlier attempt into the next free ``attempt-1``, ``attempt-2``,
    …."""
    left = [
        name
        for name in (LOG_FILE, RUN_FOLDER, OUTCOME_FILE)
        if os.path.lexists(folder / name)
    ]
    if not left:
        return
    attempts = (folder / f"attempt-{number}" for number in itertools.count(1))
    attempt = next(path for path in attempts if not os.path.lexists(path))
    attempt.mkdir()
    shutil.copy2(folder / JOB_FILE, attempt / JOB_FILE)
    for name in left:
        (folder / name).rename(attempt / name)


def quote(value: str) -> str:
    """Quote text for Hydra's parser."""
    text = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{text}'"


def _closed(
    job: Job, started: float, exit_status: int | None, status: JobStatus, reason: str
) -> Job:
    seconds = round(time.monotonic() - started, 3)
    return dataclasses.replace(
        job,
        status=status,
        exit_status=exit_status,
        reason=reason or None,
        seconds=seconds,
    )


def _wait(
    process: "subprocess.Popen[bytes]", deadline: float, interruption: Interruption
) -> tuple[JobStatus | None, int]:
    """Wait for a launcher, or end it; return the status if it was ended here, and its exit
    status."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return None, process.wait(POLL_SECONDS)
        late = time.monotonic() > deadline
        if late or interruption.number is not None:
            end_launcher(process, interruption)
            return (
                JobStatus.timed_out if late else JobStatus.stopped,
                process.returncode,
            )


def end_launcher(
    process: "subprocess.Popen[bytes]", interruption: Interruption | None = None
) -> None:
    """End a launcher and its ranks: ``END_JOB``, then SIGKILL after ``GRACE_SECONDS`` or a second
    request."""
    try:
        process.send_signal(END_JOB)
        deadline = time.monotonic() + GRACE_SECONDS
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not (interruption and interruption.at_once)
        ):
            time.sleep(POLL_SECONDS / 2)
    finally:
        # Its ranks are in other process groups, and end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` with which the death of this process ends the child by
    ``END_JOB``."""
    ask_the_kernel = end_with_parent(os.getpid(), END_JOB)
    if ask_the_kernel is None:
        return None

    def prepare() -> None:
        # nohup ignores SIGHUP, and children inherit that.
        signal.signal(END_JOB, signal.SIG_DFL)
        ask_the_kernel()

    return prepare


def print_line(text: str) -> None:
    """Print a line, escaped; ``console_stream`` ignores a closed terminal, so that jobs
    continue."""
    print(printable(text, sys.stdout), flush=True)


def describe_end(sweep: Sweep, job: Job) -> str:
    """Describe a job's outcome in one line."""
    text = f"{job.status.value} after {duration_text(job.seconds or 0.0)}"
    if job.status in (JobStatus.failed, JobStatus.out_of_memory):
        return f"{text}: {job.reason} ({sweep.job_folder(job) / LOG_FILE})"
    return f"{text}: {job.reason}" if job.reason else text
