"""Machine-readable record of a run, written by the launcher if the environment names a file for
it."""

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

EXIT_RECORD_VARIABLE = "FSDPTOYS_OUTCOME_FILE"  # names the file
LARGEST_FILE_BYTES = 2**20


@dataclass(frozen=True)
class ExitRecord:
    """How a run ended, as seen by its launcher."""

    status: int  # Exit status
    reason: str | None = None  # The failure, in one line
    out_of_memory: bool = False
    """Whether a rank ran out of memory, or got SIGKILL as from the kernel's OOM killer."""
    stopped_by: str | None = None
    """The signal that asked the run to stop, even if it then ended with status 0."""


def write_exit_record(record: ExitRecord) -> None:
    """Write the record if a file was named; errors such as a full disk are ignored."""
    if path := os.environ.get(EXIT_RECORD_VARIABLE):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the root folder
            write_atomically(path, json.dumps(dataclasses.asdict(record)) + "\n")


def read_exit_record(path: Path) -> ExitRecord | None:
    """Read the file of :func:`write_exit_record`; None if it is missing or invalid."""
    try:
        return build(ExitRecord, parse_json(read_regular(path, LARGEST_FILE_BYTES)))
    except (OSError, ValueError):
        return None
