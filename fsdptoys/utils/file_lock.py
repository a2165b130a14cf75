"""Advisory locks (flock) on files and folders, released by the system when their process ends.

Deletion of the file loses the lock, so ``FolderLock`` locks the folder itself, too; the file names
the holder, and works on network file systems that lock no folders. On a file system without flock,
``FolderLock`` locks nothing, and ``hold_lock`` raises an error.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdptoys.errors import ConfigError

from .regular_file import NotRegularFileError, open_descriptor

LOCK_FILE = ".lock"  # lock file of a run or sweep, with the process id of its writer

ATTEMPTS = 5
# ``FolderLock`` retries, since ``is_locked`` holds the lock for an instant
ATTEMPT_SECONDS = 0.02

WAIT_SECONDS = 0.2


class HeldError(Exception):
    """Another process holds the lock; its id comes from the lock file, or is "unknown"."""

    def __init__(self, holder: str = "unknown") -> None:
        super().__init__(f"held by pid {holder}")
        self.holder = holder


class NoLocksError(Exception):
    """The system or the file system does not support flock."""


class FolderLock:
    """Exclusive lock of a folder for its writer, until ``release`` or the end of the process.

    ConfigError if another process holds the lock, NotRegularFileError if the lock file is a link, a
    pipe or a folder.
    """

    def __init__(self, folder: Path) -> None:
        self._resources = contextlib.ExitStack()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._acquire(folder)
                return
            except HeldError as error:
                if attempt == ATTEMPTS:
                    raise ConfigError(
                        f"metrics.run_dir={folder} is being written by another run (pid "
                        f"{error.holder}); wait for its end, or set metrics.run_dir to another "
                        "folder"
                    ) from None
            time.sleep(ATTEMPT_SECONDS)

    def _acquire(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        with contextlib.ExitStack() as stack, contextlib.suppress(NoLocksError):
            stack.callback(unlock_file, path, lock_file(path))
            descriptor = lock_folder(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
            self._resources = stack.pop_all()

    def release(self) -> None:
        """Release the lock; may be called twice."""
        self._resources.close()


def is_locked(folder: Path) -> bool:
    """Return whether another process holds a ``FolderLock``, on this node or one with shared
    locks."""
    return is_held(folder / LOCK_FILE) or is_held(folder)


@contextlib.contextmanager
def hold_lock(
    path: Path, owner: str, wait: Callable[[str], object] | None
) -> Iterator[None]:
    """Hold a lock file, removed at the end; ``owner`` is the locked folder in messages.

    ``wait`` is called once with the holder's process id before waiting for its end; None to raise
    an error instead. ConfigError if another process holds it, the file system has no locks, or the
    path is no regular file.
    """
    descriptor = None
    while descriptor is None:
        try:
            descriptor = lock_file(path)
        except HeldError as error:
            if wait is None:
                raise ConfigError(
                    f"{owner} is being written by another process (pid {error.holder}); wait for "
                    "its end"
                ) from None
            wait(error.holder)
            wait = lambda holder: None  # noqa: E731
            time.sleep(WAIT_SECONDS)
        except NotRegularFileError as error:
            raise ConfigError(
                f"{owner} is locked by a file, and {error.sentence}; remove it"
            ) from error
        except NoLocksError as error:
            raise ConfigError(
                f"{owner} lies on a file system without locks ({error}), so that two processes "
                "could write it at once; name a folder on another"
            ) from error
    try:
        yield
    finally:
        unlock_file(path, descriptor)


def lock_file(path: Path) -> int:
    """Lock a file, created if missing, and write this process's id into it; return the descriptor
    for ``unlock_file``.

    HeldError if another process holds it, NoLocksError if the file system has no locks.
    """
    while True:
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                _lock(descriptor)
            except HeldError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                raise HeldError(holder or "unknown") from None
            # else the previous holder has removed this file meanwhile
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                stack.pop_all()
                return descriptor


def unlock_file(path: Path, descriptor: int) -> None:
    """Remove the lock file, unless another file has its name, and release the lock."""
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


def lock_folder(path: Path) -> int | None:
    """Lock a folder itself until the returned descriptor is closed; None without flock for folders,
    as on NFS."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack, contextlib.suppress(NoLocksError):
        stack.callback(os.close, descriptor)
        _lock(descriptor)
        stack.pop_all()
        return descriptor
    return None


def is_held(path: Path) -> bool:
    """Return whether another process holds the lock of a file or folder; takes a shared lock for an
    instant."""
    try:
        folder = path.is_dir()
        descriptor = (
            os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if folder
            else open_descriptor(path, os.O_RDONLY)
        )
    except OSError:
        return False
    try:
        _lock(descriptor, shared=True)
    except (HeldError, NoLocksError) as error:
        return isinstance(error, HeldError)
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, *, shared: bool = False) -> None:
    try:
        fcntl.flock(
            descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        )
    except BlockingIOError:
        raise HeldError from None
    except OSError as error:
        raise NoLocksError(str(error)) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
