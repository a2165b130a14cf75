"""One node's task of a job in a batch queue.

The first node runs the job as a sweep on one machine does and records its outcome. Every other node
starts the same launcher, which joins the first one's, with its own log and outcome file in the
job's folder.

The queue's signals (SIGUSR1 before its time limit, SIGTERM before it reclaims the nodes) ask the
launcher to stop: the run finishes its step, and the job counts as timed out or stopped. Most queues
also signal the launcher directly; it treats signals within a second as one request.

Not covered: resuming from a checkpoint when the queue restarts a job; it starts from the beginning.
"""

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import ExitRecord, read_exit_record
from fsdptoys.train.heartbeat import LOST_PEER, TIMED_OUT
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.signal_handlers import handle_signals

from .folder import Job, JobStatus, read_job, read_sweep, write_job
from .runner import TRAIN, Interruption, end_launcher, run_job, start_launcher

FIRST_PORT = 20000
PORTS = 10000
"""Range of rendezvous ports, below the ephemeral ports of the system."""

LAUNCHERS_SECONDS = 30.0
"""A launcher still running so long after the first node's is ended."""

FIRST_NODE_SECONDS = 60.0
"""Time for the first node to notice another's failure; afterwards that task fails, and the queue
ends the job."""

REASONS_SECONDS = 10.0
"""Time for other nodes to write their outcome."""

POLL_SECONDS = 0.2

ENDED_ELSEWHERE = "another machine ended the run"
"""Start of a launcher's message when another node ended the run."""

LIMIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a queue sends before its time limit."""


class QueueRequest(Interruption):
    """Forwards a queue's signals to the running launcher."""

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None

    def __enter__(self) -> "QueueRequest":
        handlers: dict[int, Any] = dict.fromkeys(
            (*LIMIT_SIGNALS, signal.SIGTERM), self._pass_on
        )
        self.enter_context(handle_signals({**handlers, signal.SIGCONT: signal.SIG_IGN}))
        return self

    def watch(self, process: int) -> None:
        """Set the launcher's process id, and forward a signal that came while it started."""
        super().watch(process)
        if self.received is not None:
            self._forward(self.received)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._forward(number)

    def _forward(self, number: int) -> None:
        if self.process is not None:
            # A launcher handles SIGUSR1, not SIGUSR2.
            signum = signal.SIGUSR1 if number in LIMIT_SIGNALS else number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signum)


def run_on_node(
    folder: Path,
    node: int,
    hosts: Sequence[str],
    job_number: int,
    train: Sequence[str] = TRAIN,
) -> None:
    """Run a node's task of a job.

    Args:
        folder: the job's folder.
        node: index of this node in the job, from 0.
        hosts: host names of the job's nodes.
        job_number: the queue's job id, from which the rendezvous port is derived.
        train: the command, before the job's overrides.
    """
    train = list(train)
    if len(hosts) > 1:
        train.append(
            f"launch.rdzv_endpoint={hosts[0]}:{FIRST_PORT + job_number % PORTS}"
        )
    # A restarted job keeps its id; SLURM's count is unset before the first restart.
    start = ".".join(
        filter(None, [str(job_number), os.environ.get("SLURM_RESTART_COUNT")])
    )
    with QueueRequest() as request:
        if node == 0:
            _lead(folder, request, train, start if len(hosts) > 1 else None)
        else:
            _follow(folder, node, request, train, start)


def _outcome_file(folder: Path, node: int | str, start: str) -> Path:
    return folder / f"outcome-node{node}-{start}.json"


def _lead(
    folder: Path, request: QueueRequest, train: Sequence[str], start: str | None
) -> None:
    """Run the job of a folder unless it has ended already.

    ``start`` identifies this start in the other nodes' file names; None with one node.
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
        job = run_job(
            folder,
            read_sweep(folder.parents[1]).time_limit_seconds,
            interruption=request,
            train=train,
        )
        write_job(folder, _refine_outcome(folder, job, request.received, start))
    finally:
        lock.release()


def _refine_outcome(
    folder: Path, job: Job, received: signal.Signals | None, start: str | None
) -> Job:
    """Return the job with its outcome refined by the queue's signals and the other nodes'
    outcomes."""
    if job.status is JobStatus.stopped and received is not None:
        if received in LIMIT_SIGNALS:
            reason = (
                f"the queue asked it to end ({received.name}), as it does before "
                "its own time limit"
            )
            return dataclasses.replace(job, status=JobStatus.timed_out, reason=reason)
        return dataclasses.replace(job, reason=f"the queue ended it ({received.name})")
    if (
        start is not None
        and job.status is JobStatus.failed
        and _is_second_hand(job.reason)
    ):
        for node, outcome in _outcomes_elsewhere(folder, start):
            if not _is_second_hand(outcome.reason):
                status = (
                    JobStatus.out_of_memory if outcome.out_of_memory else job.status
                )
                return dataclasses.replace(
                    job, status=status, reason=f"node {node}: {outcome.reason}"
                )
    return job


def _is_second_hand(reason: str | None) -> bool:
    """Return whether a launcher's reason only reports a failure on another node."""
    return (
        reason is None
        or ENDED_ELSEWHERE in reason
        or bool(LOST_PEER.search(reason) or TIMED_OUT.search(reason))
    )


def _outcomes_elsewhere(folder: Path, start: str) -> list[tuple[int, ExitRecord]]:
    deadline = time.monotonic() + REASONS_SECONDS
    while True:
        records = {
            path: read_exit_record(path)
            for path in sorted(folder.glob(_outcome_file(folder, "*", start).name))
        }
        outcomes = [
            (int(path.stem.split("-")[1][4:]), outcome)
            for path, outcome in records.items()
            if outcome
        ]
        if outcomes or time.monotonic() > deadline:
            return outcomes
        time.sleep(POLL_SECONDS)


def _follow(
    folder: Path, node: int, request: QueueRequest, train: Sequence[str], start: str
) -> None:
    """Run the launcher of a node other than the first until the run ends.

    Raises:
        RuntimeError: if the launcher failed but the first node continues.
    """
    outcome = _outcome_file(folder, node, start)
    overrides = read_job(folder).overrides
    with open_regular(folder / f"log-node{node}-{start}.txt", "ab") as log:
        process = start_launcher(folder.absolute(), [*train, *overrides], outcome, log)
    request.process = process.pid
    ran = False
    deadline = math.inf
    try:
        while process.poll() is None and time.monotonic() < deadline:
            running = read_job(folder).status is JobStatus.running
            ran = ran or running
            deadline = (
                math.inf
                if running or not ran
                else min(deadline, time.monotonic() + LAUNCHERS_SECONDS)
            )
            time.sleep(POLL_SECONDS)
    finally:
        request.process = None
        end_launcher(process)
    deadline = time.monotonic() + FIRST_NODE_SECONDS
    while process.returncode and read_job(folder).status is JobStatus.running:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"node {node}: its launcher ended with status {process.returncode}; the first "
                "node continues"
            )
        time.sleep(POLL_SECONDS)
