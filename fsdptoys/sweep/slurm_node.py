"""One node's part of a job that a batch queue runs.

The first node runs the job as a sweep on one machine does, and writes down how it ended. Every other node of the job
starts the same launcher, which meets the first one's, and keeps its own log beside; what ended it is told by the first.

A queue's signals (SIGUSR1 some time before its limit, SIGTERM before it takes the nodes away) ask the launcher to stop:
the run finishes its step, and the job counts as timed out, or as stopped. Most queues signal the launcher as well; it
takes what it gets within a second for one request.

Not covered: going on from a checkpoint when the queue starts a job again; it begins anew.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import OUTCOME_VARIABLE, Outcome, read_outcome
from fsdptoys.train.heartbeat import LOST_PEER, TIMED_OUT
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.regular_file import open_regular

from .folder import RUN_FOLDER, Job, JobStatus, read_job, read_sweep, write_job
from .runner import TRAIN, Interruption, interrupted_with_parent, quote, run_job

FIRST_PORT, PORTS = 20000, 10000
"""Where nodes meet: below what systems give out by themselves."""

LAUNCHERS_SECONDS = 30.0
"""A launcher that outlives the first node's for so long is ended."""

FIRST_NODE_SECONDS = 60.0
"""The first node has so long to notice that another has failed; then that one's task fails, and the queue ends all."""

REASONS_SECONDS = 10.0
"""Other nodes have so long to say why the run ended."""

POLL_SECONDS = 0.2

ENDED_ELSEWHERE = "another machine ended the run"
"""How a launcher begins to tell an end that it knows nothing of."""

LIMIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a queue sends some time before its limit."""


RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
"""Of the environment: how often SLURM has started a job again; it is not there before."""


class QueueRequest(Interruption):
    """Passes a queue's signals on to the running launcher, which decides what becomes of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None

    def __enter__(self) -> "QueueRequest":
        for number in (*LIMIT_SIGNALS, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, signal.SIG_IGN)
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if self.process is not None:
            # A launcher knows SIGUSR1 alone of the two.
            asked = signal.SIGUSR1 if number in LIMIT_SIGNALS else number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, asked)


def run_on_node(folder: Path, node: int, hosts: Sequence[str], job_number: int, train: Sequence[str] = TRAIN) -> None:
    """Run a node's part of the job of a folder.

    Args:
        folder: of the job.
        node: of the job's nodes, from 0.
        hosts: their names.
        job_number: the queue's; the port that the nodes meet at follows from it.
        train: the command, before the job's words.
    """
    train = list(train)
    if len(hosts) > 1:
        train.append(f"launch.rdzv_endpoint={hosts[0]}:{FIRST_PORT + job_number % PORTS}")
    # A queue that starts a job again keeps its number.
    start = ".".join(filter(None, [str(job_number), os.environ.get(RESTARTS_VARIABLE)]))
    with QueueRequest() as request:
        if node == 0:
            _lead(folder, request, train, start if len(hosts) > 1 else None)
        else:
            _follow(folder, node, request, train, start)


def _outcome_file(folder: Path, node: int | str, start: str) -> Path:
    return folder / f"outcome-node{node}-{start}.json"


def _lead(folder: Path, request: QueueRequest, train: Sequence[str], start: str | None) -> None:
    """Run the job of a folder, unless that has been done.

    Args:
        folder: of the job.
        request: what the queue asks for meanwhile.
        train: the command, before the job's words.
        start: in the names of what the other nodes leave; None where there are none.
    """
    try:
        lock = FolderLock(folder)
    except ConfigError:
        print(f"{folder} is being run by another process", flush=True)
        return
    try:
        if read_job(folder).status.ended:
            print(f"{folder} has been run in the meantime", flush=True)
            return
        job = run_job(folder, read_sweep(folder.parents[1]).time_limit_seconds, interruption=request, train=train)
        told = _retell(folder, job, request.received, start)
        if told != job:
            write_job(folder, told)
    finally:
        lock.release()


def _retell(folder: Path, job: Job, received: signal.Signals | None, start: str | None) -> Job:
    """How a job ended, with what the queue and the other nodes know of it."""
    if job.status is JobStatus.stopped and received is not None:
        if received in LIMIT_SIGNALS:
            reason = f"the queue asked it to end ({received.name}), as it does before its own time limit"
            return dataclasses.replace(job, status=JobStatus.timed_out, reason=reason)
        return dataclasses.replace(job, reason=f"the queue ended it ({received.name})")
    if start is not None and job.status is JobStatus.failed and _is_second_hand(job.reason):
        for node, outcome in _outcomes_elsewhere(folder, start):
            if not _is_second_hand(outcome.reason):
                status = JobStatus.out_of_memory if outcome.out_of_memory else job.status
                return dataclasses.replace(job, status=status, reason=f"node {node}: {outcome.reason}")
    return job


def _is_second_hand(reason: str | None) -> bool:
    """Whether a launcher tells of the failure of others, which one of them knows better."""
    return reason is None or ENDED_ELSEWHERE in reason or bool(LOST_PEER.search(reason) or TIMED_OUT.search(reason))


def _outcomes_elsewhere(folder: Path, start: str) -> list[tuple[int, Outcome]]:
    deadline = time.monotonic() + REASONS_SECONDS
    while True:
        found = {path: read_outcome(path) for path in sorted(folder.glob(_outcome_file(folder, "*", start).name))}
        told = [(int(path.stem.split("-")[1][4:]), outcome) for path, outcome in found.items() if outcome]
        if told or time.monotonic() > deadline:
            return told
        time.sleep(POLL_SECONDS)


def _follow(folder: Path, node: int, request: QueueRequest, train: Sequence[str], start: str) -> None:
    """Start the launcher of a node that is not the first, and end with the run.

    Raises:
        RuntimeError: if the launcher failed and the first node does not end of it.
    """
    outcome = _outcome_file(folder, node, start)
    words = read_job(folder).words
    with open_regular(folder / f"log-node{node}-{start}.txt", "ab") as log:
        process = subprocess.Popen(
            [*train, *words, f"metrics.run_dir={quote(str(folder.absolute() / RUN_FOLDER))}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, OUTCOME_VARIABLE: str(outcome)},
            start_new_session=True,
            preexec_fn=interrupted_with_parent(),
        )
    request.process = process.pid
    ran, ended_at = False, None
    try:
        while process.poll() is None:
            running = read_job(folder).status is JobStatus.running
            ran = ran or running
            if running or not ran:
                ended_at = None
            elif ended_at is None:
                ended_at = time.monotonic()
            elif time.monotonic() - ended_at > LAUNCHERS_SECONDS:
                break
            time.sleep(POLL_SECONDS)
    finally:
        request.process = None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAUNCHERS_SECONDS / 2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + FIRST_NODE_SECONDS
    while process.returncode and read_job(folder).status is JobStatus.running:
        if time.monotonic() > deadline:
            raise RuntimeError(f"node {node}: its launcher ended with status {process.returncode}, the first goes on")
        time.sleep(POLL_SECONDS)
