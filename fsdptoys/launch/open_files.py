"""The limit of open files (``ulimit -n``), which fails a launcher in many places with different errors."""

import errno
import re

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from fsdptoys.errors import ConfigError

LEAST_FILES = 32
"""A launcher of two CPU ranks starts with 32 and fails with 24."""

_SPENT = re.compile(r"too many open files|failed to init uv loop", re.I)


def check_open_files() -> None:
    """Check that this process may open enough files to start ranks.

    Raises:
        ConfigError: if the limit is too low.
    """
    if resource is not None and 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < LEAST_FILES:
        raise ConfigError(too_few_files())


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports that no more files may be opened."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        if _SPENT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def too_few_files() -> str:
    """Return one sentence on the limit and how to raise it."""
    limit = "unknown" if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"ulimit -n is {limit}, which is too few open files for a run; set it higher, as with: ulimit -n 1024"
