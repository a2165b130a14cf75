"""The launcher's temporary folder: private to its user and locked while the launcher lives.

A killed launcher cannot remove its folder, so the next one removes each folder of its user whose lock is free. A
process id in a file would not do: ids are reused, and differ between containers that share a temporary folder.
"""

import contextlib
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = f"fsdptoys-launch-{re.sub(r'[^A-Za-z0-9.]', '-', platform.node())[:64]}-"
"""Includes the host name, since a network disk may hide the locks of other hosts."""


class LaunchFolder:
    """A new folder of mode 0700; removes the folders of killed launchers first."""

    def __init__(self) -> None:
        _remove_stale(Path(tempfile.gettempdir()))
        lock = None
        while lock is None or not self.path.exists():  # another launcher may have removed it before it was locked
            if lock is not None:
                os.close(lock)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _lock(self.path)
        self._lock = lock

    def remove(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path, *, required: bool = False) -> int | None:
    """Lock a folder and return its descriptor; None if another process holds the lock or the folder is gone.

    On file systems that cannot lock folders, return the descriptor without a lock, or None if the lock is required.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if required or isinstance(error, BlockingIOError):
            os.close(descriptor)
            return None
    return descriptor


def _remove_stale(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*") if fcntl is not None else ():
            if (descriptor := _lock(folder, required=True)) is not None:
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
