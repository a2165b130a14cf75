"""Advisory locks (flock) on a file or a folder, which the system releases however their holder ends.

A lock file left behind by a killed process blocks nobody: the lock belongs to the open file, not to the name. For the
same reason a lock file that someone deletes protects nothing any more, so a folder is locked itself, too.
"""

import contextlib
import os
from pathlib import Path

from .regular_file import open_descriptor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class HeldError(Exception):
    """Another process holds the lock.

    Args:
        holder: its process id as the lock file has it, or "unknown".
    """

    def __init__(self, holder: str = "unknown") -> None:
        super().__init__(f"held by pid {holder}")
        self.holder = holder


class NoLocksError(Exception):
    """The system or the file system has no such locks."""


def lock_file(path: Path) -> int:
    """Lock a file, which is made if it is missing, and write this process's id into it.

    Returns:
        A descriptor that holds the lock; for ``unlock_file``.

    Raises:
        HeldError: if another process holds it.
        NoLocksError: if there are none here.
        NotRegularFileError: if something else has the name; a symbolic link is not followed.
        OSError: as the system refuses.
    """
    while True:
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except HeldError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise HeldError(holder or "unknown") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it in the meantime: the name is free, or another's


def unlock_file(path: Path, descriptor: int) -> None:
    """Remove the lock file, unless another has taken its name, and release the lock."""
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


def lock_folder(path: Path) -> int | None:
    """Lock a folder itself.

    Returns:
        A descriptor that holds the lock until it is closed; None where there are no such locks (NFS locks no folders).

    Raises:
        HeldError: if another process holds it.
        OSError: if it cannot be opened.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
    except NoLocksError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Whether another process holds the lock of a file or a folder; holds a shared one itself for an instant."""
    if fcntl is None:
        return False
    try:
        folder = path.is_dir()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if folder else open_descriptor(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    if fcntl is None:
        raise NoLocksError("no flock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeldError from None
    except OSError as error:
        raise NoLocksError(str(error)) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
