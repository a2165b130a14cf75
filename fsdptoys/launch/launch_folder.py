"""The launcher's temporary folder: private to its user and locked while the launcher lives.

A killed launcher cannot remove its folder, so the next one removes each folder of its user whose lock is free. A
process id in a file would not do: ids are reused, and differ between containers that share a temporary folder.
"""

import contextlib
import os
import platform
import re
import shutil
import stat
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
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _lock(self.path)
            # Another launcher may have removed it before it was locked.
            if lock is not None and self.path.exists():
                self._lock = lock
                break
            if lock is not None:
                os.close(lock)

    def remove(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder and return its descriptor; None if another process holds the lock or the folder is gone.

    On file systems that cannot lock folders, the descriptor is returned without a lock.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def _remove_stale(parent: Path) -> None:
    for folder in _own_folders(parent) if fcntl is not None else []:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _own_folders(parent: Path) -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                    found.append(path)
    return found
