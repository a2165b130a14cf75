"""Replace a file atomically: readers see the old content or the new one; symbolic links are not followed."""

import contextlib
import os
from pathlib import Path

from .regular_file import open_regular


def write_atomically(path: "str | os.PathLike[str]", content: "str | bytes", *, sync: bool = False) -> None:
    """Write a new file under a hidden name in the same folder and rename it to ``path``.

    Text is written as UTF-8; a symbolic link at ``path`` is replaced, not its target; ``sync`` flushes the content to
    the disk before the rename. After an OSError the old file stays, without a part of the new one.
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
