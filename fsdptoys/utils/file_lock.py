"""Advisory locks (flock) on a file or a folder, which the system releases however their holder ends.

A lock file left behind by a killed process blocks nobody: the lock belongs to the open file, not to the name. For the
same reason a lock file that someone deletes protects nothing any more, so a folder is locked itself, too.

One writer a folder: advisory locks of its lock file and of the folder itself.

The lock file names the holder, and is seen on network disks that lock no folders. The folder's own lock holds where
someone deletes the file as "stale" under a run. Where the system or the file system has no such locks, there is none.

One process at a time, by an advisory lock that the system takes back however its holder ends.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdptoys.errors import ConfigError

from .regular_file import NotRegularFileError, open_descriptor

LOCK_FILE = ".lock"
"""Held by the process that writes the run, and holds its number."""


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


WAIT_SECONDS = 0.2


@contextmanager
def alone(path: Path, owner: str, wait: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock file of that path, which is there for as long.

    Args:
        path: of the lock file.
        owner: what is locked, for messages.
        wait: told once who holds it, and then the holder's end is waited for; None to refuse instead.

    Raises:
        ConfigError: if another process holds it, the file system has no locks, or the path is no regular file.
    """
    descriptor = _take_lock(path, owner, wait)
    try:
        yield
    finally:
        unlock_file(path, descriptor)


def _take_lock(path: Path, owner: str, wait: Callable[[str], None] | None) -> int:
    while True:
        try:
            return lock_file(path)
        except HeldError as error:
            if wait is None:
                raise ConfigError(
                    f"{owner} is being written by another process (pid {error.holder}); wait for its end"
                ) from None
            wait(error.holder)
            wait = _silent
            time.sleep(WAIT_SECONDS)
        except NotRegularFileError as error:
            raise ConfigError(f"{owner} is locked by a file, and {error.sentence}; remove it") from error
        except NoLocksError as error:
            raise ConfigError(
                f"{owner} lies on a file system without locks ({error}), so that two processes could write it at once; "
                "name a folder on another"
            ) from error


def _silent(holder: str) -> None:
    """Wait without a word."""
