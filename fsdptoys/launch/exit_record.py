"""How a launcher's run has ended, in a file for the program that started it: words for people are on stderr.

Nothing is written unless the environment names the file.
"""

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular

OUTCOME_VARIABLE = "FSDPTOYS_OUTCOME_FILE"
"""Environment variable that names the file."""


LARGEST_FILE_BYTES = 2**20


@dataclass(frozen=True)
class Outcome:
    """How a run has ended, as its launcher knows it."""

    status: int
    """Exit status."""
    reason: str | None = None
    """What went wrong, in one line."""
    out_of_memory: bool = False
    """Whether a rank ran out of memory, or was killed as the system does where host memory runs out."""
    stopped_by: str | None = None
    """Name of the signal that asked the run to end, however well it then ended."""


def leave_outcome(outcome: Outcome) -> None:
    """Write it down where that was asked for; a disk that is full does not change how the run has ended."""
    named = os.environ.get(OUTCOME_VARIABLE)
    if named:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the root folder
            write_atomically(named, json.dumps(dataclasses.asdict(outcome)) + "\n")


def read_outcome(path: Path) -> Outcome | None:
    """What :func:`leave_outcome` wrote; None where it wrote nothing."""
    try:
        return build(Outcome, parse_json(read_regular(path, LARGEST_FILE_BYTES)))
    except (OSError, ValueError):
        return None
