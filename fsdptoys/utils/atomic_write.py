"""Replace a file atomically: readers see the old content or the new one; symbolic links are not followed."""

import contextlib
import os
from pathlib import Path

from .regular_file import open_regular


def write_atomically(path: "str | os.PathLike[str]", content: "str | bytes", *, sync: bool = False) -> None:
    """Write a new file under a hidden name in the same folder and rename it to ``path``.

    Args:
        path: the file; a symbolic link in its place is replaced, not its target.
        content: text is written as UTF-8.
        sync: flush the content to the disk before the rename.

    Raises:
        OSError: from the system; the old file stays, without a part of the new one.
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
