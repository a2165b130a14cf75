"""The launcher's temporary folder: private to its user and locked while the launcher lives.

A killed launcher cannot remove its folder, so the next one removes each folder of its user with a
free lock. A process id in a file would not do: ids are reused, and differ between containers that
share a temporary folder.
"""

import contextlib
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

from fsdptoys.utils.file_lock import HeldError, lock_folder

PREFIX = f"fsdptoys-launch-{re.sub(r'[^A-Za-z0-9.]', '-', platform.node())[:64]}-"
"""Includes the host name, since a network disk may hide the locks of other hosts."""


class LaunchFolder:
    """A new folder of mode 0700; removes the folders of killed launchers first."""

    def __init__(self) -> None:
        _remove_stale(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Another launcher may remove it before it is locked.
            with contextlib.suppress(HeldError, FileNotFoundError):
                self._lock = lock_folder(self.path)
                if self.path.exists():
                    return
                self._unlock()

    def remove(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, HeldError):
            lock = None if folder.is_symlink() else lock_folder(folder)
            if lock is None:  # nothing tells whether its launcher lives
                continue
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
