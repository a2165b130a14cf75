"""The first of several failures, and the post-mortem of failed ranks: hung ranks, last heartbeats,
flight recordings.

Flight recordings are each rank's last collectives before a hang. torch records under NCCL, and its
``torchfrtrace`` compares the ranks; torch_npu records under HCCL. Setting names are from torch
2.7.1 and 2.13.0 and torch_npu 2.13.0. Not tested on a GPU or an NPU.
"""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptoys.profiler import ExplainedOutOfMemoryError
from fsdptoys.train import heartbeat
from fsdptoys.train.launch_env import remembered_run_dir
from fsdptoys.train.stop import STOP_SIGNALS

from .exit_record import ExitRecord

REQUESTS = (*STOP_SIGNALS, signal.SIGINT)
"""A rank ended by one of these, not by the launcher, was asked to stop."""

FLIGHT_RECORDER_FOLDER = "flight_recorder"
"""Of the launcher's folder and, after a failure, of the run directory."""
FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variable with the prefix of the recordings' files, in newer and older torch."""
HCCL_FILE_NAME = "TORCH_HCCL_DEBUG_INFO_TEMP_FILE"  # the same in torch_npu


@dataclass(frozen=True)
class FirstFailure:
    """The failure that caused the others in one start of the workers."""

    status: int
    """Exit status for the launcher: 2 for a configuration mistake, 128 + number for a stop signal,
    else 1."""
    headline: str  # First line of the message at the end of the run
    in_short: str  # The failure in one line
    details: str = ""  # Text after the headline, such as a traceback
    final: bool = False
    """Whether a restart is pointless: the workers would fail again or were asked to stop."""
    silent: bool = False  # Whether the rank ended without a recorded exception
    # Whether the failure is only a consequence of another rank's end
    of_others: bool = False
    # Whether a rank was ended by a stop signal, rather than failing
    stopped: bool = False
    timed_out: bool = False  # Whether the rank waited in vain for others
    hung: tuple[int, ...] = ()
    """If the failed rank timed out on others or lost them: ranks that raised nothing and were ended
    by the launcher."""
    out_of_memory: bool = False
    """Whether memory ran out: the rank raised it, or got SIGKILL as from the kernel's out-of-memory
    killer."""

    @property
    def reason(self) -> str:
        """The failure in one line, for the outcome file."""
        message = self.in_short if self.details else self.headline
        # the message repeats it
        return message.replace(f" {ExplainedOutOfMemoryError.__name__}:", "", 1)

    def message(self, suffix: str = "") -> str:
        """Message at the end of the run, with ``suffix`` appended to the headline."""
        return self.headline + suffix + (f":\n{self.details}" if self.details else "")

    def hung_ranks(self, pids: Mapping[int, int], folder: Path) -> list[str]:
        """Return a line for each rank of this machine that others timed out on, as far as known."""
        heartbeats = (
            remembered_run_dir(folder) or folder
        ) / heartbeat.HEARTBEATS_FOLDER
        # Where several ended in silence, some of them may have waited for the one that hung.
        what = (
            "it hung"
            if self.timed_out and len(self.hung) == 1
            else "it hung, or waited for one that did"
        )
        lines = []
        for rank in self.hung:
            sign = heartbeat.describe_heartbeat(heartbeats, rank, pids[rank])
            last = f"last heartbeat {sign}" if sign else "without a known heartbeat"
            lines.append(
                f"rank {rank} raised no exception and had to be terminated: {what}, {last}"
            )
        return lines

    def post_mortem(self, pids: Mapping[int, int], folder: Path) -> str:
        """Return the hung ranks, last heartbeats if the failure was silent, and the path of
        recordings.

        Moves recordings of collectives from the launcher's folder to the run directory.
        """
        message = "".join(f"\n{line}" for line in self.hung_ranks(pids, folder))
        run_dir = remembered_run_dir(folder)
        if run_dir is None:
            return message
        if self.silent:
            signs = heartbeat.describe_last_heartbeats(
                run_dir / heartbeat.HEARTBEATS_FOLDER, pids
            )
            message += f"; {signs}" if signs else ""
        recordings = keep_recordings(folder, run_dir)
        return f"{message}\n{recordings}" if recordings else message


def own_failure_is_recorded(folder: Path) -> bool | None:
    """Return whether some rank has recorded a failure of its own in ``folder``; None if none has
    recorded anything."""
    messages = [record["message"] for record in _records(folder)]
    return any(_remoteness(message) == 0 for message in messages) if messages else None


def first_failure(
    failures: Mapping[int, ProcessFailure],
    folder: Path,
    killed: Collection[int] = (),
    terminated: Collection[int] = (),
) -> FirstFailure:
    """Find the failure that caused the others.

    Args:
        failures: by rank, as collected by the elastic agent; at least one.
        folder: error files of this start's workers, including ranks ended before the launcher saw
            them fail.
        killed: ranks that the launcher killed because they did not end.
        terminated: ranks still running when the launcher sent SIGTERM after another rank's failure.
    """
    records = [record for record in _records(folder) if "rank" in record["extraInfo"]]
    records.sort(
        key=lambda record: (
            _remoteness(record["message"]),
            record["extraInfo"]["time_ns"],
        )
    )
    silent = {
        rank: failure
        for rank, failure in failures.items()
        if failure.error_file == "<N/A>"
    }
    by_sigterm = {
        rank
        for rank, value in silent.items()
        if value.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    }
    by_launcher = {*killed, *by_sigterm.intersection(terminated)}
    ended = {
        rank: failure for rank, failure in silent.items() if rank not in by_launcher
    }
    if records and not (ended and _remoteness(records[0]["message"])):
        recorded = {record["extraInfo"]["rank"] for record in records}
        return _recorded(
            records[0], tuple(sorted(silent.keys() - ended.keys() - recorded))
        )
    requests = {number for request in REQUESTS for number in (-request, 128 + request)}
    # NCCL aborts a rank whose peer is gone.
    others = {
        rank: failure
        for rank, failure in ended.items()
        if failure.exitcode not in {*requests, -signal.SIGABRT}
    }
    requested = {
        rank: failure for rank, failure in ended.items() if failure.exitcode in requests
    }
    if requested and not others:
        rank, failure = min(requested.items())
        number = abs(failure.exitcode) % 128
        message = (
            f"stopped by {signal.Signals(number).name} (rank {rank} got it); all "
            "workers have ended"
        )
        return FirstFailure(128 + number, message, message, final=True, stopped=True)
    rank, failure = min((others or ended or silent or failures).items())
    if failure.exitcode >= 0:
        message = (
            f"rank {rank} ended with status {failure.exitcode} and left no traceback"
        )
    else:
        reason = (
            ", as the system does where host memory runs out"
            if failure.exitcode == -signal.SIGKILL
            else ""
        )
        message = f"rank {rank} was ended by {failure.signal_name()}{reason}"
    killed_by_system = bool(ended) and failure.exitcode == -signal.SIGKILL
    return FirstFailure(
        1,
        message,
        message,
        silent=True,
        of_others=not ended,
        out_of_memory=killed_by_system,
    )


def make_exit_record(
    status: int, message: str | None, number: int | None, first: FirstFailure | None
) -> ExitRecord:
    """Return the launcher's exit record, given its final message, the signal it received and the
    first failure."""
    if status > 128 or (number and not status):
        return ExitRecord(
            status, message, stopped_by=signal.Signals(number or status - 128).name
        )
    return ExitRecord(
        status, first.reason if first else message, bool(first and first.out_of_memory)
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    # Written by our own ranks into a private folder; a killed rank may leave a partial record.
    records = []
    for path in folder.glob("**/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            records.append(json.loads(path.read_text())["message"])
    return records


def _recorded(record: dict[str, Any], hung: tuple[int, ...]) -> FirstFailure:
    extra = record["extraInfo"]
    message = record["message"]
    line = re.sub(r"^LostRanksError: ", "", message.strip()).splitlines()[0]
    alone = extra["config_error"] or extra["given_up"]
    remoteness = _remoteness(message)
    return FirstFailure(
        status=2 if extra["config_error"] else 1,
        headline=alone or f"rank {extra['rank']} failed",
        details="" if alone else extra["py_callstack"].rstrip(),
        in_short=extra["given_up"] or f"rank {extra['rank']} failed: {line}",
        final=extra["final"],
        of_others=remoteness > 0,
        timed_out=remoteness == 1,
        hung=hung if remoteness else (),
        out_of_memory=message.startswith(f"{ExplainedOutOfMemoryError.__name__}:"),
    )


def _remoteness(message: str) -> int:
    """0 for a rank's own failure, 1 for a timeout waiting for others, 2 for a lost connection to
    another rank."""
    if heartbeat.TIMED_OUT.search(message):
        return 1
    return 2 if heartbeat.LOST_PEER.search(message) else 0


def name_recordings(folder: Path) -> None:
    """Direct recordings to the launcher's folder if the environment enables them and names no other
    place."""
    target = folder / FLIGHT_RECORDER_FOLDER
    target.mkdir()
    if os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and not any(
        name in os.environ for name in FILE_NAMES
    ):
        os.environ[FILE_NAMES["TORCH_FR_BUFFER_SIZE" not in os.environ]] = (
            f"{target}/rank_"
        )
    if os.environ.get("TORCH_HCCL_DUMP_ON_TIMEOUT") == "1":
        os.environ.setdefault(HCCL_FILE_NAME, f"{target}/rank_")


def keep_recordings(folder: Path, run_dir: Path) -> str | None:
    """Move recordings from the launcher's folder into the run directory; return a line about them,
    or None."""
    recordings = list((folder / FLIGHT_RECORDER_FOLDER).iterdir())
    if not recordings:
        return None
    target = run_dir / FLIGHT_RECORDER_FOLDER
    target.mkdir(exist_ok=True)
    for path in recordings:
        with contextlib.suppress(OSError):  # the move below raises it
            # a move across file systems would write through a link
            (target / path.name).unlink(missing_ok=True)
        shutil.move(path, target / path.name)
    return (
        f"the last collectives of each rank are in {target}; torchfrtrace {target} compares those "
        "of NCCL"
    )
