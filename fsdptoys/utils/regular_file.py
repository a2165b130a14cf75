"""Open regular files only: no named pipes, no devices, and no symbolic links for writing.

A run directory may have another author: ``open`` blocks on a FIFO, and writing follows a link to
any file of the user. So files are opened with ``O_NONBLOCK`` (no effect on regular files) and, for
writing, ``O_NOFOLLOW``, and checked through the open descriptor to avoid a race. Links are followed
for reading, as in the Hugging Face hub's cache, and in parent folders.
"""

import errno
import os
import stat
from functools import partial
from pathlib import Path
from typing import IO, Any

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


class NotRegularFileError(OSError):
    """The path names a pipe, a device, a folder, or, for writing, a symbolic link."""

    def __init__(self, path: "str | os.PathLike[str]", mode: int) -> None:
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(
            errno.EINVAL, f"it is {kind} and not a regular file", os.fspath(path)
        )
        self.sentence = f"{os.fspath(path)} is {kind} and not a regular file"
        """For a message that names the path."""
        self._made_of = (path, mode)

    def __reduce__(self) -> "tuple[Any, ...]":
        # Ranks exchange pickled errors; OSError.__reduce__ would pass OSError's arguments.
        return type(self), self._made_of


def open_regular(
    path: "str | os.PathLike[str]", mode: str = "rb", **options: Any
) -> IO[Any]:
    """``open`` for regular files, else NotRegularFileError; modes that write refuse a symbolic link
    at ``path``."""
    writes = any(letter in mode for letter in "wax+")
    return open(
        path, mode, opener=partial(open_descriptor, follow=not writes), **options
    )


def open_descriptor(
    path: "str | os.PathLike[str]",
    flags: int,
    *,
    follow: bool = False,
    permissions: int = 0o666,
) -> int:
    """``os.open`` for regular files, else NotRegularFileError; the descriptor is not inherited.

    Args:
        follow: whether the last part of the path may be a symbolic link.
        permissions: of a new file, before the umask.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        # ELOOP: a link; ENXIO: a pipe without reader, or a socket; EISDIR: a folder opened for
        # writing
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK):
            kind = _mode_of(path)
            if kind is not None and not stat.S_ISREG(kind):
                raise NotRegularFileError(path, kind) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NotRegularFileError(path, mode)
    return descriptor


def read_regular(path: "str | os.PathLike[str]", largest_bytes: int) -> bytes:
    """Return the content of a regular file; ValueError if it is larger than ``largest_bytes``."""
    with open_regular(path, "rb") as file:
        content: bytes = file.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise ValueError(f"it is longer than {largest_bytes} bytes")
    return content


def check_regular(path: "str | os.PathLike[str]") -> None:
    """NotRegularFileError unless a path is a regular file or does not exist; links are not
    followed."""
    mode = _mode_of(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise NotRegularFileError(path, mode)


def kind_of(path: "str | os.PathLike[str]") -> str | None:
    """Return the type of a file, with an article; None if it does not exist. Links are not
    followed."""
    mode = _mode_of(path)
    return None if mode is None else KINDS.get(stat.S_IFMT(mode), "something else")


def _mode_of(path: "str | os.PathLike[str]") -> int | None:
    try:
        return Path(path).lstat().st_mode
    except OSError:
        return None
