"""Which of several failures came first and made the others, and how it is told."""

import json
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .heartbeat import LOST_PEER, TIMED_OUT


@dataclass(frozen=True)
class FirstFailure:
    """What made a start of the workers fail."""

    status: int
    """Exit status for the launcher: 2 for a mistake in the configuration, else 1."""
    told: str
    """For the end of the run."""
    in_short: str
    """The same in one line."""
    final: bool
    """Whether starting again would end in the same way."""
    silent: bool
    """Whether the rank ended without saying why."""
    of_others: bool
    """Whether it is nothing but a consequence of another rank's end."""


def first_failure(failures: Mapping[int, ProcessFailure], folder: Path, killed: Collection[int] = ()) -> FirstFailure:
    """Find the failure that made the others fail.

    Args:
        failures: by rank, as the elastic launcher collected them; at least one.
        folder: where the workers' error files of this start lie; ranks that were ended before the launcher saw them
            fail count too.
        killed: ranks that our side killed, since they did not end.
    """
    records = [json.loads(path.read_text())["message"] for path in folder.glob("**/error.json")]
    ours = [record for record in records if "rank" in record["extraInfo"]]
    ours.sort(key=lambda record: (_remoteness(record["message"]), record["extraInfo"]["time_ns"]))
    silent = {rank: failure for rank, failure in failures.items() if failure.error_file == "<N/A>"}
    # Ranks that still ran were sent SIGTERM by the launcher itself, and SIGKILL if they took their time.
    ended = {
        rank: failure
        for rank, failure in silent.items()
        if failure.exitcode not in (-signal.SIGTERM, 128 + signal.SIGTERM) and rank not in killed
    }
    if ours and not (ended and _remoteness(ours[0]["message"])):
        return _recorded(ours[0])
    rank, failure = min((ended or silent or failures).items())
    if failure.exitcode >= 0:
        told = f"rank {rank} ended with status {failure.exitcode} and left no traceback"
    else:
        reason = ", as the system does where host memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        told = f"rank {rank} was ended by {failure.signal_name()}{reason}"
    return FirstFailure(1, told, told, final=False, silent=True, of_others=not ended)


def _recorded(record: dict[str, Any]) -> FirstFailure:
    extra, message = record["extraInfo"], record["message"]
    told = extra["config_error"] or f"rank {extra['rank']} failed:\n{extra['py_callstack'].rstrip()}"
    line = re.sub(r"^LostRanksError: ", "", message.strip()).splitlines()[0]
    return FirstFailure(
        status=2 if extra["config_error"] else 1,
        told=told,
        in_short=f"rank {extra['rank']} failed: {line}",
        final=extra["final"],
        silent=False,
        of_others=_remoteness(message) > 0,
    )


def _remoteness(message: str) -> int:
    """0 for a failure of a rank's own; 1 where it waited in vain for others; 2 where another one's end cut it off."""
    return 1 if TIMED_OUT.search(message) else 2 if LOST_PEER.search(message) else 0
