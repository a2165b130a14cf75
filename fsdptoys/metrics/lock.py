"""One writer a folder: advisory locks of its lock file and of the folder itself.

The lock file names the holder, and is seen on network disks that lock no folders. The folder's own lock holds where
someone deletes the file as "stale" under a run. Where the system or the file system has no such locks, there is none.
"""

import os
import time
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import HeldError, NoLocksError, is_held, lock_file, lock_folder, unlock_file

from .config import LOCK_FILE

LOOKS = 5
LOOK_SECONDS = 0.02
"""``is_locked`` holds the lock for an instant, a writer all the time."""


class FolderLock:
    """Held from construction until ``release`` or the end of the process.

    Raises:
        ConfigError: if another process holds it.
        NotRegularFileError: if the lock file is a link, a pipe or a folder.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None
        self._folder: int | None = None
        for look in range(1, LOOKS + 1):
            try:
                self._take(folder)
                return
            except HeldError as error:
                if look == LOOKS:
                    raise ConfigError(
                        f"metrics.run_dir={folder} is being written by another run (pid {error.holder}); wait for its "
                        "end, or set metrics.run_dir to another folder"
                    ) from None
            time.sleep(LOOK_SECONDS)

    def _take(self, folder: Path) -> None:
        try:
            descriptor = lock_file(self._path)
        except NoLocksError:
            return
        try:
            self._folder = lock_folder(folder)
        except BaseException:
            unlock_file(self._path, descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others write; may be called twice."""
        if self._descriptor is not None:
            unlock_file(self._path, self._descriptor)
            self._descriptor = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def is_locked(folder: Path) -> bool:
    """Whether another process, on this machine or on one that shares locks with it, writes there now."""
    return is_held(folder / LOCK_FILE) or is_held(folder)
