"""One-sentence messages for system errors, which are neither bugs nor configuration mistakes."""

import errno
import os

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line

FIXES = {
    errno.EMFILE: "raise the limit with ulimit -n",
    errno.ENFILE: "close other programs, or have the administrator raise fs.file-max",
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EROFS: "name a place that can be written",
    errno.EIO: "check the disk",
    errno.ENOMEM: "end other programs",
    errno.EAGAIN: "end other programs, or raise the limit with ulimit -u",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "remove the links that lead to each other",
    errno.EACCES: "give this user the right, or name another place",
    errno.ESTALE: "mount the network disk again",
}
"""Error caused by the machine → fix."""


def check_current_folder() -> None:
    """Check that the current folder exists.

    Raises:
        ConfigError: if it has been deleted or is not accessible.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}), as after it was deleted; change to another one"
        ) from error


def explain_environment(error: Exception) -> str | None:
    """Return one sentence for an error caused by the machine or environment; None for others, which are bugs."""
    if isinstance(error, MemoryError):
        reason = one_line(error) or "no reason given"
        return f"host memory ran out ({reason}); end other programs, or use a machine with more"
    if isinstance(error, OSError) and error.errno in FIXES:
        place = f" for {one_line(os.fsdecode(error.filename))}" if isinstance(error.filename, (str, bytes)) else ""
        return f"the system refuses{place}: {error.strerror}; {FIXES[error.errno]}"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # tempfile's
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    if isinstance(error, ValueError) and "TORCH_DISTRIBUTED_DEBUG" in str(error):
        value = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
        return f"TORCH_DISTRIBUTED_DEBUG={one_line(value)} in the environment must be OFF, INFO or DETAIL; unset it"
    if isinstance(error, ValueError) and str(error).strip().startswith("Invalid log settings"):
        value = os.environ.get("TORCH_LOGS", "")
        return f"TORCH_LOGS={one_line(value)} in the environment names no log of PyTorch; unset it"
    if isinstance(error, RuntimeError) and "determine home directory" in str(error):  # pathlib's
        return "the home folder is unknown, so ~ cannot be expanded; set HOME, or write the path without ~"
    return None
