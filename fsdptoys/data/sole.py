"""One process at a time, by an advisory lock that the system takes back however its holder ends."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdptoys.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOOK_SECONDS = 0.2


@contextmanager
def alone(path: Path, owner: str, wait: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock file of that path, which is there for as long.

    Args:
        path: of the lock file.
        owner: what is locked, for messages.
        wait: told once who holds it, and then the holder's end is waited for; None to refuse instead.

    Raises:
        ConfigError: if another process holds it, or the file system has no locks.
    """
    descriptor = _lock(path, owner, wait)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _lock(path: Path, owner: str, wait: Callable[[str], None] | None) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError("no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
            os.close(descriptor)  # its holder has removed it in the meantime
        except FileNotFoundError:
            os.close(descriptor)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            if wait is None:
                raise ConfigError(
                    f"{owner} is being written by another process (pid {holder}); wait for its end"
                ) from None
            wait(holder)
            wait = _silent
            time.sleep(LOOK_SECONDS)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"{owner} lies on a file system without locks ({error}), so that two processes could write it at once; "
                "name a folder on another"
            ) from error


def _silent(holder: str) -> None:
    """Wait without a word."""
