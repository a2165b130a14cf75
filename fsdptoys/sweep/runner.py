"""One job, run in processes of its own: how it ended is judged from outside, so that no end of it ends the sweep.

The job is a ``fsdptoys train`` in a session of its own, so that Ctrl-C reaches the sweep alone. Whoever is to end it
sends SIGINT, of which a launcher ends all its ranks at once, and SIGKILL where that has not helped. Where the sweep
itself is killed, Linux interrupts the job.

Who asks a sweep to end: Ctrl-C, a batch system or a closed terminal, remembered until the sweep looks.

Handlers that only count leave every file of the sweep whole; an exception out of a handler could come anywhere.
"""

import contextlib
import ctypes
import dataclasses
import itertools
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
from typing import Any

from fsdptoys.launch.exit_record import OUTCOME_VARIABLE, Outcome, read_outcome
from fsdptoys.train.stop import SAME_REQUEST_SECONDS
from fsdptoys.utils.regular_file import open_regular

from .folder import JOB_FILE, LOG_FILE, RUN_FOLDER, Job, JobStatus, read_job, write_job

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """Counts the requests to end for as long as it is entered; in the main thread only."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the first signal, or None so far."""
        self.at_once = False
        """Whether there was a second one."""
        self.process: int | None = None
        """Id of the launcher that runs, for those who pass a signal on."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish, or a shell's for what runs behind it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._first = number, now
        elif number == signal.SIGINT or now - self._first >= SAME_REQUEST_SECONDS:
            self.at_once = True  # a batch system tells the same request to several processes, which pass it on


TRAIN = (sys.executable, "-m", "fsdptoys", "train")

OUTCOME_FILE = "outcome.json"
"""In a job's folder: how its launcher ended, as the launcher knows it."""

ATTEMPT = "attempt"
"""In a job's folder: ``attempt-1`` and on hold what earlier ends of the job have left."""

GRACE_SECONDS = 15.0
"""A launcher that has not ended so long after SIGINT is killed; it gives its ranks five."""

POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def run_job(
    folder: Path,
    time_limit_seconds: float | None,
    *,
    interruption: Interruption | None = None,
    train: Sequence[str] = TRAIN,
) -> Job:
    """Run the job of a folder and write down how it ended; what an earlier end has left is moved aside.

    Args:
        folder: of the job, with its ``job.json``.
        time_limit_seconds: after which the job is ended; None for no limit.
        interruption: asked all the while whether the job is to be ended; without one, an exception does it.
        train: the command, before the job's words.

    Returns:
        The job, ended.
    """
    folder = folder.absolute()
    set_aside(folder)
    started = time.monotonic()
    job = dataclasses.replace(
        read_job(folder),
        status=JobStatus.running,
        exit_status=None,
        reason=None,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=None,
    )
    write_job(folder, job)
    ended_for: JobStatus | None = None
    exit_status: int | None = None
    with open_regular(folder / LOG_FILE, "wb") as log:
        process = subprocess.Popen(
            [*train, *job.words, f"metrics.run_dir={quote(str(folder / RUN_FOLDER))}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, OUTCOME_VARIABLE: str(folder / OUTCOME_FILE)},
            start_new_session=True,
            preexec_fn=interrupted_with_parent(),
        )
        if interruption is not None:
            interruption.process = process.pid
        deadline = started + time_limit_seconds if time_limit_seconds is not None else float("inf")
        try:
            ended_for, exit_status = _wait(process, deadline, interruption)
        except BaseException:
            _end(process, None)
            ended = JobStatus.stopped, "the sweep was ended"
            write_job(folder, _closed(job, started, process.returncode, *ended))
            raise
        finally:
            if interruption is not None:
                interruption.process = None
    outcome = read_outcome(folder / OUTCOME_FILE)
    if ended_for is JobStatus.timed_out:
        ended = ended_for, f"it was ended after {time_limit_seconds:g} s, which is the limit of a job's time"
    elif ended_for is JobStatus.stopped:
        ended = ended_for, "the sweep was ended"
    else:
        ended = judge(exit_status or 0, outcome)
    job = _closed(job, started, exit_status, *ended)
    write_job(folder, job)
    return job


def judge(exit_status: int, outcome: Outcome | None) -> tuple[JobStatus, str]:
    """How a job ended that nobody of the sweep has ended, and why; empty where it is done.

    Args:
        exit_status: of its launcher, negative for a signal.
        outcome: what the launcher left, if it came to that.
    """
    if outcome is not None and outcome.stopped_by is not None:
        return JobStatus.stopped, f"{outcome.stopped_by} asked it to end"
    if exit_status == 0:
        return JobStatus.done, ""
    if exit_status == -signal.SIGKILL:
        return JobStatus.out_of_memory, "its launcher was killed, as the system does where host memory runs out"
    if exit_status < 0:
        return JobStatus.failed, f"its launcher was ended by {signal.Signals(-exit_status).name}"
    if outcome is None or outcome.reason is None:
        return JobStatus.failed, f"its launcher ended with status {exit_status}, and {LOG_FILE} may say why"
    return JobStatus.out_of_memory if outcome.out_of_memory else JobStatus.failed, outcome.reason


def set_aside(folder: Path) -> None:
    """Move what an earlier end of a job has left into the next free ``attempt-1``, ``attempt-2``, …."""
    left = [name for name in (LOG_FILE, RUN_FOLDER, OUTCOME_FILE) if os.path.lexists(folder / name)]
    if not left:
        return
    names = (folder / f"{ATTEMPT}-{number}" for number in itertools.count(1))
    attempt = next(name for name in names if not os.path.lexists(name))
    attempt.mkdir()
    shutil.copy2(folder / JOB_FILE, attempt / JOB_FILE)
    for name in left:
        (folder / name).rename(attempt / name)


def quote(value: str) -> str:
    """A value that Hydra's parser reads as this very text."""
    text = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{text}'"


def _closed(job: Job, started: float, exit_status: int | None, status: JobStatus, reason: str) -> Job:
    seconds = round(time.monotonic() - started, 3)
    return dataclasses.replace(job, status=status, exit_status=exit_status, reason=reason or None, seconds=seconds)


def _wait(
    process: "subprocess.Popen[bytes]", deadline: float, interruption: Interruption | None
) -> tuple[JobStatus | None, int]:
    """Wait for a launcher's end, or bring it about; tells for what, and its exit status."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return None, process.wait(POLL_SECONDS)
        late = time.monotonic() > deadline
        if late or (interruption is not None and interruption.number is not None):
            _end(process, interruption)
            return JobStatus.timed_out if late else JobStatus.stopped, process.returncode


def _end(process: "subprocess.Popen[bytes]", interruption: Interruption | None) -> None:
    """End a launcher and all its ranks, as gently as there is time for."""
    try:
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if interruption is not None and interruption.at_once:
                break
            time.sleep(POLL_SECONDS / 2)
    finally:
        # Its ranks lead groups of their own, and end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def interrupted_with_parent() -> Callable[[], None] | None:
    """What a child does before it becomes the launcher; on Linux alone, which has such a thing."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def ask_the_system() -> None:
        # A shell starts what runs behind it with SIGINT ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask_the_system
