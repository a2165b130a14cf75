"""The launcher's folder: private to its user, locked while the launcher lives, removed by a later one otherwise.

A launcher that is killed cannot remove its folder. The next one does: it takes the lock of each such folder of its own
user, which is free exactly where the launcher that made it is gone. A process id in a file would not do, since numbers
are used again, and differ between containers that share a folder for temporary files.
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
"""With the host's name: on a network disk the locks of other hosts may be invisible."""


class LaunchFolder:
    """A new folder of mode 0700; those that killed launchers left are removed first."""

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
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None where another process holds it, or the folder is gone.

    Where the file system has no locks of folders, the descriptor alone.
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
