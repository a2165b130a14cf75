"""Checksums of a checkpoint's files as they are written, and of folders of weights as they are
read.

safetensors has no checksums: its reader noticed 1 of 300 flipped bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsdptoys.errors import ConfigError
from fsdptoys.utils.sealed_folder import FileSum, RunningSum, sum_path, sums_from_json

from .safetensors_io import AGAIN, read_json
from .storage import Storage

CHECKSUMS_FILE = "checksums.json"  # size and SHA-256 of every file of a folder


class SummingStorage:
    """Wraps a storage and sums every file while it is written.

    Nothing is read back: the sums are of the intended bytes, so they also detect damage on the way
    to the disk.
    """

    def __init__(self, storage: Storage) -> None:
        self.sums: dict[str, FileSum] = {}  # by path, of completely written files
        self.refused: OSError | None = None  # first write error of the wrapped storage
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
        self.sums[path] = summing.sum.result()


class _SummingFile:
    def __init__(self, file: BinaryIO) -> None:
        self.sum = RunningSum()
        self._file = file

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self.sum.update(data)
        return count


def verify_checksums(path: Path, only_sizes: bool = False) -> int | None:
    """Compare a folder with its checksums, if any; return the number of files; ConfigError if one
    is damaged.

    ``only_sizes`` compares the sizes without reading the files.
    """
    manifest = path / CHECKSUMS_FILE
    if not manifest.exists():
        return None
    tree = read_json(manifest)
    try:
        files = sums_from_json(tree.get("files"))
    except ValueError as error:
        raise ConfigError(
            f"{manifest} is damaged: it does not list names, sizes and SHA-256; {AGAIN}"
        ) from error
    fix = f"{AGAIN}, or delete {CHECKSUMS_FILE} if the file was changed on purpose"
    for name, expected in files.items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{file} is missing, though {CHECKSUMS_FILE} lists it; {AGAIN}"
            ) from error
        if size != expected.size:
            raise ConfigError(
                f"{file} is damaged: it holds {size} bytes, and {CHECKSUMS_FILE} says "
                f"{expected.size}; {fix}"
            )
        if only_sizes:
            continue
        try:
            actual = sum_path(file)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror or error}); {AGAIN}"
            ) from error
        if actual != expected:
            raise ConfigError(
                f"{file} is damaged: its SHA-256 is {actual.sha256[:12]}…, and {CHECKSUMS_FILE} "
                f"says {expected.sha256[:12]}…; {fix}"
            )
    return len(files)
