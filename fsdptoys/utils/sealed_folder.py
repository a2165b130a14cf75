"""Folders that are complete or absent after a crash at any instant, and the checksums of their
files.

A folder is filled under another name beside its destination. ``seal_folder`` syncs the files to
disk, writes a manifest last, and renames the folder. So a folder under its own name is complete.

Weights, prepared tokens and packed rows are sealed here. Checkpoints follow the same order in
``checkpoint.retention``, through a ``Storage``: they replace earlier ones, and object stores cannot
rename. Manifests differ in what else they hold. Checksums detect damage, not tampering.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsdptoys.errors import ConfigError

from .atomic_write import sync_to_disk, write_atomically
from .regular_file import open_regular

BLOCK_BYTES = 2**20
DIGEST_LENGTH = 64


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and hexadecimal SHA-256 of a file."""

    size: int
    sha256: str


class RunningSum:
    """Size and SHA-256 of the bytes so far."""

    def __init__(self) -> None:
        self.size = 0
        self._digest = hashlib.sha256()

    def update(self, data: Any) -> None:
        """Append bytes, or a view of an array."""
        self._digest.update(data)
        self.size += memoryview(data).nbytes

    def read(
        self, file: IO[bytes], visit: Callable[[bytes], object] = lambda block: None
    ) -> FileSum:
        """Append a file from its position to its end; ``visit`` is called with each block."""
        while block := file.read(BLOCK_BYTES):
            self.update(block)
            visit(block)
        return self.result()

    def result(self) -> FileSum:
        """Return the sum so far."""
        return FileSum(self.size, self._digest.hexdigest())


def sum_bytes(content: bytes) -> FileSum:
    """Return the sum of a small file's content."""
    return FileSum(len(content), hashlib.sha256(content).hexdigest())


def sum_path(
    path: Path, visit: Callable[[bytes], object] = lambda block: None
) -> FileSum:
    """Return the sum of a regular file; ``visit`` is called with each block."""
    with open_regular(path) as file:
        return RunningSum().read(file, visit)


def is_file_name(name: object) -> bool:
    """Return whether this is a plain file name, not a path to another folder."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not set(name) & set("/\\\0")
    )


def sums_to_json(files: Mapping[str, FileSum]) -> dict[str, dict[str, Any]]:
    """Convert sums by file name to JSON values, sorted by name."""
    return {
        name: {"bytes": files[name].size, "sha256": files[name].sha256}
        for name in sorted(files)
    }


def sums_from_json(tree: object) -> dict[str, FileSum]:
    """Invert ``sums_to_json``.

    ValueError unless every entry has a file name (not a path), a size and a SHA-256.
    """
    if not isinstance(tree, dict):
        raise ValueError("it does not list files")
    files = {}
    for name, entry in tree.items():
        is_entry = (
            is_file_name(name)
            and isinstance(entry, dict)
            and set(entry) == {"bytes", "sha256"}
        )
        size, digest = (entry["bytes"], entry["sha256"]) if is_entry else (None, None)
        if (
            type(size) is not int
            or size < 0
            or not isinstance(digest, str)
            or len(digest) != DIGEST_LENGTH
        ):
            raise ValueError(f"it describes {name!r:.100} wrongly")
        files[name] = FileSum(size, digest)
    return files


def seal_folder(
    working: Path,
    folder: Path,
    manifest: str,
    content: str,
    *,
    drop: Sequence[str] = (),
) -> None:
    """Turn a filled working folder into ``folder``, beside it, with a manifest of this content.

    After an OSError or a crash there is no ``folder``. Files named in ``drop``, which only the
    work needed, are removed once the manifest is there.
    """
    for file in working.iterdir():
        sync_to_disk(file)
    write_atomically(working / manifest, content, sync=True)
    for name in drop:
        (working / name).unlink(missing_ok=True)
    with suppress(OSError):  # some systems sync no folders
        sync_to_disk(working)
    working.rename(folder)
    with suppress(OSError):
        sync_to_disk(folder.parent)


def check_new_folder(path: Path) -> None:
    """Check that ``path`` does not exist or is an empty folder, else raise a ConfigError."""
    try:
        has_content = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    if has_content:
        what = "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(
            f"{path} {what}, and nothing is written over; name a folder that does not exist"
        )


@contextmanager
def new_folder(path: Path, manifest: str) -> Iterator[Path]:
    """Yield a working folder; seal it as ``path`` with the sums of its files, or delete it on an
    error.

    A killed process leaves a hidden ``.NAME.….partial``, which is never read and can be deleted.
    ConfigError if ``path`` is taken or cannot be written.
    """
    check_new_folder(path)
    folder = path.absolute()
    if folder.is_symlink():
        folder = folder.resolve()
    working = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    try:
        working.mkdir(parents=True)
        yield working
        sums = sums_to_json({file.name: sum_path(file) for file in working.iterdir()})
        seal_folder(
            working, folder, manifest, json.dumps({"files": sums}, indent=2) + "\n"
        )
    except OSError as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _cannot_be_written(path: Path, error: OSError) -> str:
    reason = error.strerror or error
    return (
        f"{path} cannot be written ({reason}), and nothing is left there; name a folder on a "
        "disk with room"
    )
