"""Size and SHA-256 of files, stored in every folder and compared on read.

safetensors has no checksums: its reader noticed 1 of 300 flipped bits. Checksums detect damage, not tampering.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from .safetensors_io import is_file_name
from .storage import Storage

BLOCK_BYTES = 2**20
DIGEST_LENGTH = 64


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and hexadecimal SHA-256 of a file."""

    size: int
    sha256: str


def sum_file(file: BinaryIO) -> FileSum:
    """Sum a file from its current position to its end."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return FileSum(size, digest.hexdigest())


def sums_to_json(files: Mapping[str, FileSum]) -> dict[str, dict[str, Any]]:
    """Convert sums by file name to JSON values, sorted by name."""
    return {name: {"bytes": files[name].size, "sha256": files[name].sha256} for name in sorted(files)}


def sums_from_json(tree: object) -> dict[str, FileSum]:
    """Invert ``sums_to_json``; ValueError unless every entry has a file name (not a path), a size and a SHA-256."""
    if not isinstance(tree, dict):
        raise ValueError("it does not list files")
    files = {}
    for name, entry in tree.items():
        if not is_file_name(name) or not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
            raise ValueError(f"it describes {name!r:.100} wrongly")
        size, digest = entry["bytes"], entry["sha256"]
        if type(size) is not int or size < 0 or not isinstance(digest, str) or len(digest) != DIGEST_LENGTH:
            raise ValueError(f"it describes {name!r:.100} wrongly")
        files[name] = FileSum(size, digest)
    return files


class SummingStorage:
    """Wraps a storage and sums every file while it is written.

    Nothing is read back: the sums are of the intended bytes, so they also detect damage on the way to the disk.

    Attributes:
        sums: path → size and SHA-256, of completely written files.
        refused: the first write error of the wrapped storage.
    """

    def __init__(self, storage: Storage) -> None:
        self.sums: dict[str, FileSum] = {}
        self.refused: OSError | None = None
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See ``Storage``. The file must be written sequentially."""
        try:
            with self._storage.writing(path) as file:
                summing = _SummingFile(file)
                yield cast(BinaryIO, summing)
        except OSError as error:
            self.refused = self.refused or error
            raise
        self.sums[path] = FileSum(summing.size, summing.digest.hexdigest())


class _SummingFile:
    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._file = file

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self.digest.update(data)
        self.size += written
        return written
