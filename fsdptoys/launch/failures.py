"""Which of several failures came first and made the others, and how it is told.

What ranks that failed left behind, for whoever looks for the cause: who hung, where each was, its collectives.
"""

import contextlib
import json
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptoys.profiler import ExplainedOutOfMemoryError
from fsdptoys.train.heartbeat import (
    HEARTBEATS_FOLDER,
    LOST_PEER,
    MOST_RANKS_TOLD,
    TIMED_OUT,
    last_signs,
    ranks_in_words,
    sign_of,
)
from fsdptoys.train.launch_env import (
    remembered_run_dir,
)
from fsdptoys.train.stop import STOP_SIGNALS

from .exit_record import Outcome
from .flight_recorder import keep_recordings

REQUESTS = (*STOP_SIGNALS, signal.SIGINT)
"""A rank that ends by one of these, which our side did not send, was asked to stop."""

OUT_OF_MEMORY = (ExplainedOutOfMemoryError.__name__, "OutOfMemoryError", "MemoryError")
"""Names of the exceptions of a rank whose memory ran out."""


@dataclass(frozen=True)
class FirstFailure:
    """What made a start of the workers fail."""

    status: int
    """Exit status for the launcher: 2 for a mistake in the configuration, 128 plus its number for a signal that asked
    to stop, else 1."""
    headline: str
    """For the end of the run, in one line."""
    in_short: str
    """The whole in one line."""
    details: str = ""
    """What follows the headline."""
    final: bool = False
    """Whether the workers are not to be started again, since they would end in the same way or were asked to stop."""
    silent: bool = False
    """Whether the rank ended without saying why."""
    of_others: bool = False
    """Whether it is nothing but a consequence of another rank's end."""
    stopped: bool = False
    """Whether it is no failure, but a rank was asked to stop when it could not do so well."""
    timed_out: bool = False
    """Whether the rank waited in vain for others."""
    hung: tuple[int, ...] = ()
    """Where the failed rank waited for others or lost them: ranks that raised nothing and were ended by our side."""
    out_of_memory: bool = False
    """Whether memory ran out: the rank said so, or was killed as the system does then."""

    @property
    def reason(self) -> str:
        """What went wrong, in one line."""
        told = self.in_short if self.details else self.headline
        return told.replace(f" {ExplainedOutOfMemoryError.__name__}:", "", 1)  # what follows says it

    @property
    def told(self) -> str:
        """For the end of the run."""
        return self.told_after("")

    def told_after(self, before: str) -> str:
        """For the end of the run, with a few words at the end of the headline."""
        return self.headline + before + (f":\n{self.details}" if self.details else "")


def own_failure_is_recorded(folder: Path) -> bool | None:
    """Whether some rank has failed for a reason of its own; None where no rank has recorded anything.

    Args:
        folder: where the workers' error files of this start lie.
    """
    messages = [record["message"] for record in _records(folder)]
    return any(_remoteness(message) == 0 for message in messages) if messages else None


def first_failure(
    failures: Mapping[int, ProcessFailure],
    folder: Path,
    killed: Collection[int] = (),
    terminated: Collection[int] = (),
) -> FirstFailure:
    """Find the failure that made the others fail.

    Args:
        failures: by rank, as the elastic launcher collected them; at least one.
        folder: where the workers' error files of this start lie; ranks that were ended before the launcher saw them
            fail count too.
        killed: ranks that our side killed, since they did not end.
        terminated: ranks that still ran when our side sent SIGTERM, since another one had failed.
    """
    ours = [record for record in _records(folder) if "rank" in record["extraInfo"]]
    ours.sort(key=lambda record: (_remoteness(record["message"]), record["extraInfo"]["time_ns"]))
    silent = {rank: failure for rank, failure in failures.items() if failure.error_file == "<N/A>"}
    by_sigterm = (-signal.SIGTERM, 128 + signal.SIGTERM)
    ended = {
        rank: failure
        for rank, failure in silent.items()
        if rank not in killed and not (rank in terminated and failure.exitcode in by_sigterm)
    }
    if ours and not (ended and _remoteness(ours[0]["message"])):
        recorded = {record["extraInfo"]["rank"] for record in ours}
        return _recorded(ours[0], tuple(sorted(silent.keys() - ended.keys() - recorded)))
    requests = {number for request in REQUESTS for number in (-request, 128 + request)}
    # NCCL aborts a rank whose peer is gone.
    others = {rank: failure for rank, failure in ended.items() if failure.exitcode not in {*requests, -signal.SIGABRT}}
    asked = {rank: failure for rank, failure in ended.items() if failure.exitcode in requests}
    if asked and not others:
        return _stopped(*min(asked.items()))
    rank, failure = min((others or ended or silent or failures).items())
    if failure.exitcode >= 0:
        told = f"rank {rank} ended with status {failure.exitcode} and left no traceback"
    else:
        reason = ", as the system does where host memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        told = f"rank {rank} was ended by {failure.signal_name()}{reason}"
    killed_by_system = bool(ended) and failure.exitcode == -signal.SIGKILL
    return FirstFailure(1, told, told, silent=True, of_others=not ended, out_of_memory=killed_by_system)


def outcome_of(status: int, told: str | None, number: int | None, first: FirstFailure | None) -> Outcome:
    """What a launcher leaves for programs.

    Args:
        status: its exit status.
        told: what it prints, if anything.
        number: of the signal that it got, if any.
        first: the failure that made the others fail, where one was found.
    """
    if status > 128 or (number and not status):
        return Outcome(status, told, stopped_by=signal.Signals(number or status - 128).name)
    return Outcome(status, first.reason if first else told, bool(first and first.out_of_memory))


def _records(folder: Path) -> list[dict[str, Any]]:
    # Of our own ranks, in a folder that is this user's; one that was killed may have left half of it.
    records = []
    for path in folder.glob("**/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            records.append(json.loads(path.read_text())["message"])
    return records


def _recorded(record: dict[str, Any], hung: tuple[int, ...]) -> FirstFailure:
    extra, message = record["extraInfo"], record["message"]
    line = re.sub(r"^LostRanksError: ", "", message.strip()).splitlines()[0]
    alone, remoteness = extra["config_error"] or extra["given_up"], _remoteness(message)
    return FirstFailure(
        status=2 if extra["config_error"] else 1,
        headline=alone or f"rank {extra['rank']} failed",
        details="" if alone else extra["py_callstack"].rstrip(),
        in_short=extra["given_up"] or f"rank {extra['rank']} failed: {line}",
        final=extra["final"],
        of_others=remoteness > 0,
        timed_out=remoteness == 1,
        hung=hung if remoteness else (),
        out_of_memory=message.partition(":")[0] in OUT_OF_MEMORY,
    )


def _stopped(rank: int, failure: ProcessFailure) -> FirstFailure:
    number = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
    told = f"stopped by {signal.Signals(number).name} (rank {rank} got it); all workers have ended"
    return FirstFailure(128 + number, told, told, final=True, stopped=True)


def _remoteness(message: str) -> int:
    """0 for a failure of a rank's own; 1 where it waited in vain for others; 2 where another one's end cut it off."""
    return 1 if TIMED_OUT.search(message) else 2 if LOST_PEER.search(message) else 0


def hung_ranks(first: FirstFailure, pids: Mapping[int, int], folder: Path) -> list[str]:
    """A line for each rank that others waited for in vain, as far as can be told.

    Args:
        first: what made the workers fail.
        pids: the ranks of this machine.
        folder: the launcher's.
    """
    heartbeats = (remembered_run_dir(folder) or folder) / HEARTBEATS_FOLDER
    # Where several ended in silence, some of them may have waited for the one that hung.
    what = "it hung" if first.timed_out and len(first.hung) == 1 else "it hung, or waited for one that did"
    lines = []
    for rank in first.hung[:MOST_RANKS_TOLD]:
        sign = sign_of(heartbeats, rank, pids[rank])
        last = f"last sign {sign}" if sign else "without any sign that is known"
        lines.append(f"rank {rank} raised nothing and had to be ended: {what}, {last}")
    if more := first.hung[MOST_RANKS_TOLD:]:
        lines.append(f"so did {ranks_in_words(list(more))}")
    return lines


def remains(first: FirstFailure, pids: Mapping[int, int], folder: Path) -> str:
    """What follows the failure's own words: who hung, where all ranks were if it was silent, and where to read on.

    Args:
        first, pids, folder: as for ``hung_ranks``. Recordings of collectives are moved from the folder to the run's.
    """
    told = "".join(f"\n{line}" for line in hung_ranks(first, pids, folder))
    run_dir = remembered_run_dir(folder)
    if run_dir is None:
        return told
    if first.silent:
        signs = last_signs(run_dir / HEARTBEATS_FOLDER, pids)
        told += f"; {signs}" if signs else ""
    kept = keep_recordings(folder, run_dir)
    return f"{told}\n{kept}" if kept else told
