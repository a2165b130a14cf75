"""Durable writes: sync to the disk, and atomic replacement, in which readers see the old content or
the new one."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from fsdptoys.errors import ConfigError

from .regular_file import open_regular


def check_output(
    path: Path,
    option: str,
    usual: str,
    suffixes: Sequence[str],
    label: str | None = None,
) -> None:
    """Check before a long computation that a file can be written.

    Args:
        usual: file that messages propose for ``option``.
        suffixes: allowed ones, the usual first.
        label: name of the file in messages; the option by default.

    Raises:
        ConfigError: for another suffix, a folder, or a path outside any folder.
    """
    label = label or option
    if path.suffix.lower() not in suffixes:
        name = path.name.partition(".")[0] or Path(usual).stem
        raise ConfigError(
            f"{label} {path} must end in {suffixes[0]}; write {option} {name}{suffixes[0]}"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = (
            "is a folder"
            if path.is_dir()
            else f"is in {path.parent}, which is not a folder"
        )
        raise ConfigError(f"{label} {path} {problem}; write {option} {usual}")


def write_atomically(
    path: "str | os.PathLike[str]", content: "str | bytes", *, sync: bool = False
) -> None:
    """Write a new file under a hidden name in the same folder and rename it to ``path``.

    Text is written as UTF-8; a symbolic link at ``path`` is replaced, not its target; ``sync``
    flushes the content to the disk before the rename. After an OSError the old file stays, without
    a part of the new one.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    # The process id separates writers of the same file.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # from a killed process, or a link to elsewhere
        with open_regular(part, "xb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def sync_to_disk(path: Path) -> None:
    """Sync a file's bytes or a folder's entries to disk, so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems refuse this for folders.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
