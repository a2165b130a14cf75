"""One writer a folder: an advisory lock that the system takes back however its holder ends.

A lock file that was left behind by a killed process holds nobody up, since the lock is the open file's and not the
name's. Where the system or the file system has no such locks, there is none.
"""

import contextlib
import os
import time
from pathlib import Path

from fsdptoys.errors import ConfigError

from .config import LOCK_FILE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOOKS = 5
LOOK_SECONDS = 0.02
"""Who only looks whether there is a lock (``is_locked``) holds one for an instant; a writer holds it all the time."""


class FolderLock:
    """Held from construction until ``release`` or the end of the process.

    Raises:
        ConfigError: if another process holds it.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None
        looks = 0
        while fcntl is not None and self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(descriptor)
                looks += 1
                if looks < LOOKS:
                    time.sleep(LOOK_SECONDS)
                    continue
                raise ConfigError(
                    f"metrics.run_dir={folder} is being written by another run (pid {holder}); wait for its end, or "
                    "set metrics.run_dir to another folder"
                ) from None
            except OSError:  # a file system without locks
                os.close(descriptor)
                return
            if self._is_the_files(descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                self._descriptor = descriptor
            else:  # its holder has removed it in the meantime: the name is free, or another's
                os.close(descriptor)

    def release(self) -> None:
        """Let others write; may be called twice."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                if self._is_the_files(self._descriptor):  # else the folder is a new one, with a lock of its own
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _is_the_files(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def is_locked(folder: Path) -> bool:
    """Whether another process, on this machine or on one that shares locks with it, writes there now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        if fcntl is None:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
