"""One process at a time, by an advisory lock that the system takes back however its holder ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import HeldError, NoLocksError, lock_file, unlock_file
from fsdptoys.utils.regular_file import NotRegularFileError

LOOK_SECONDS = 0.2


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
    descriptor = _lock(path, owner, wait)
    try:
        yield
    finally:
        unlock_file(path, descriptor)


def _lock(path: Path, owner: str, wait: Callable[[str], None] | None) -> int:
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
            time.sleep(LOOK_SECONDS)
        except NotRegularFileError as error:
            raise ConfigError(f"{owner} is locked by a file, and {error.sentence}; remove it") from error
        except NoLocksError as error:
            raise ConfigError(
                f"{owner} lies on a file system without locks ({error}), so that two processes could write it at once; "
                "name a folder on another"
            ) from error


def _silent(holder: str) -> None:
    """Wait without a word."""
