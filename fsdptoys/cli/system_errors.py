"""One-sentence messages for errors of the system and of ``import torch`` itself; nothing here
imports torch.

PyTorch imports every installed distribution with an entry point in the group ``torch.backends``,
such as torch_npu; without CANN's libraries the import ends in a traceback. So does an import with
an invalid ``LOGLEVEL``.
"""

import errno
import os
import re

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

REFUSED_VARIABLE = re.compile(
    r"TORCH_DISTRIBUTED_DEBUG|Invalid log settings|Unknown level"
)
"""Part of PyTorch's message on an environment variable with an invalid value."""


def check_current_folder() -> None:
    """Check that the current folder exists.

    Raises:
        ConfigError: if it has been deleted or is not accessible.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}), as after it was deleted; "
            "change to another one"
        ) from error


def explain_environment(error: Exception) -> str | None:
    """Return one sentence for an error caused by the machine or environment; None for others, which
    are bugs."""
    if isinstance(error, MemoryError):
        reason = one_line(error) or "no reason given"
        return f"host memory ran out ({reason}); end other programs, or use a machine with more"
    if isinstance(error, OSError) and error.errno in FIXES:
        target = (
            f" for {one_line(os.fsdecode(error.filename))}"
            if isinstance(error.filename, (str, bytes))
            else ""
        )
        return f"the system refuses{target}: {error.strerror}; {FIXES[error.errno]}"
    # raised by tempfile
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    if isinstance(error, ValueError) and REFUSED_VARIABLE.search(str(error)):
        return (
            f"PyTorch refuses a variable of the environment ({one_line(error)}); unset "
            "TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS or LOGLEVEL"
        )
    # raised by pathlib
    if isinstance(error, RuntimeError) and "determine home directory" in str(error):
        return (
            "the home folder is unknown, so ~ cannot be expanded; set HOME, or write the path "
            "without ~"
        )
    return None


def explain_autoload(error: BaseException) -> str | None:
    """Return a sentence with backend, reason and fix; None for other errors."""
    match = re.search(r"Failed to load the backend extension: (\S+?)\.? ", f"{error} ")
    if not isinstance(error, RuntimeError) or match is None or error.__cause__ is None:
        return None
    backend = match[1]
    reason = (
        str(error.__cause__).strip().splitlines() or [type(error.__cause__).__name__]
    )[0]
    return (
        f"PyTorch cannot be imported, since the installed {backend} cannot be loaded [{reason}]; "
        "install what it needs (torch_npu: CANN, whose set_env.sh is sourced), or set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment to do without it"
    )
