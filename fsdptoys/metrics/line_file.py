"""A file that grows by whole lines; those that find no room wait in memory until there is some."""

import contextlib
import errno
import os
from collections import deque
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk or a quota that is full, which may pass."""


class LineFile:
    """Appends to a file, which is made if it is missing.

    Raises:
        OSError: as the system refuses, here and in ``write``.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._waiting: deque[bytes] = deque()

    def add(self, line: str) -> None:
        """Add a line, without its end, to those that wait."""
        self._waiting.append(f"{line}\n".encode())

    def write(self) -> None:
        """Hand every line that waits to the system, each as a whole or not at all."""
        while self._waiting:
            self._write_line(self._waiting[0])
            self._waiting.popleft()

    def _write_line(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        """Close the file; what waits still is lost."""
        with contextlib.suppress(OSError):
            self._file.close()
