"""A file extended by complete lines, which wait in memory while the disk is full."""

import contextlib
import errno
import itertools
import os
from collections import deque
from pathlib import Path

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import open_regular

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or quota, which may be temporary."""


class LineFile:
    """Appends lines to a file, created if missing.

    Raises:
        OSError: from the system, here and in all methods; also if the path is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path, "ab+", buffering=0)
        self._waiting: deque[bytes] = deque()

    def add(self, line: str) -> None:
        """Queue a line, given without its newline."""
        self._waiting.append(f"{line}\n".encode())

    def write(self) -> None:
        """Write all queued lines to the system, each completely or not at all."""
        while self._waiting:
            before, left = os.fstat(self._file.fileno()).st_size, self._waiting[0]
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise
            self._waiting.popleft()

    def restore(self) -> str | None:
        """Write the lines again if the file was removed, moved or replaced; the open file still has them.

        A replacement is renamed to ``<name>.replaced-<n>``, not overwritten.

        Returns:
            A message if the file was written again.
        """
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            found = None
        if found is not None and os.path.samestat(found, os.fstat(self._file.fileno())):
            return None
        sentence = f"{self._path} was removed during the run; its lines have been written again"
        if found is not None:
            names = (self._path.with_name(f"{self._path.name}.replaced-{number}") for number in itertools.count(1))
            aside = next(name for name in names if not os.path.lexists(name))
            os.rename(self._path, aside)
            sentence = (
                f"{self._path} was replaced during the run; the other file is now {aside.name}, and the lines of the "
                "run have been written again"
            )
        self._file.seek(0)
        write_atomically(self._path, self._file.read())
        renewed = open_regular(self._path, "ab+", buffering=0)
        self._file.close()
        self._file = renewed
        return sentence

    def close(self) -> None:
        """Close the file without its queued lines; may be called twice."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self.restore()
            with contextlib.suppress(OSError):
                self._file.close()
