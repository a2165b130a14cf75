"""Size and SHA-256 of files, stored in every folder and compared on read; atomic creation of a folder with them.

safetensors has no checksums: its reader noticed 1 of 300 flipped bits. Checksums detect damage, not tampering.

A new folder is filled under a temporary name next to its destination, synced to disk, and renamed. A process killed
before the rename leaves a hidden ``.NAME.….partial``, which is never read and can be deleted.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import SafetensorError

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import sync_to_disk
from fsdptoys.utils.regular_file import open_regular

from .safetensors_io import AGAIN, is_file_name, read_json
from .storage import Storage

CHECKSUMS_FILE = "checksums.json"  # size and SHA-256 of every file of a folder
BLOCK_BYTES = 2**20
DIGEST_LENGTH = 64


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and hexadecimal SHA-256 of a file."""

    size: int
    sha256: str


def sum_file(file: BinaryIO, advance: Callable[[int], object] = lambda count: None) -> FileSum:
    """Sum a file from its current position to its end; ``advance`` is called with the bytes of each block."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
        size += len(block)
        advance(len(block))
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
        is_entry = is_file_name(name) and isinstance(entry, dict) and set(entry) == {"bytes", "sha256"}
        size, digest = (entry["bytes"], entry["sha256"]) if is_entry else (None, None)
        if type(size) is not int or size < 0 or not isinstance(digest, str) or len(digest) != DIGEST_LENGTH:
            raise ValueError(f"it describes {name!r:.100} wrongly")
        files[name] = FileSum(size, digest)
    return files


class SummingStorage:
    """Wraps a storage and sums every file while it is written.

    Nothing is read back: the sums are of the intended bytes, so they also detect damage on the way to the disk.
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


def check_new_folder(path: Path) -> None:
    """Check that ``path`` does not exist or is an empty folder, else raise a ConfigError."""
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    if taken:
        what = "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(f"{path} {what}, and nothing is written over; name a folder that does not exist")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``path``, with checksums, on success, and delete it on an error.

    ConfigError if ``path`` is taken or cannot be written.
    """
    check_new_folder(path)
    place = path.absolute()
    if place.is_symlink():
        place = place.resolve()
    temporary = place.parent / f".{place.name}.{secrets.token_hex(4)}.partial"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        sums = sums_to_json({file.name: _sum(file) for file in temporary.iterdir()})
        (temporary / CHECKSUMS_FILE).write_text(json.dumps({"files": sums}, indent=2) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            sync_to_disk(file)
        sync_to_disk(temporary)
        temporary.rename(place)
        sync_to_disk(place.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify_checksums(path: Path, only_sizes: bool = False) -> int | None:
    """Compare a folder with its checksums, if any; return the number of files; ConfigError if one is damaged.

    ``only_sizes`` compares the sizes without reading the files.
    """
    manifest = path / CHECKSUMS_FILE
    if not manifest.exists():
        return None
    tree = read_json(manifest)
    try:
        files = sums_from_json(tree.get("files"))
    except ValueError as error:
        raise ConfigError(f"{manifest} is damaged: it does not list names, sizes and SHA-256; {AGAIN}") from error
    fix = f"{AGAIN}, or delete {CHECKSUMS_FILE} if the file was changed on purpose"
    for name, said in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise ConfigError(f"{path / name} is missing, though {CHECKSUMS_FILE} lists it; {AGAIN}") from error
        if size != said.size:
            raise ConfigError(
                f"{path / name} is damaged: it holds {size} bytes, and {CHECKSUMS_FILE} says {said.size}; {fix}"
            )
        if not only_sizes and (found := _sum(path / name)) != said:
            raise ConfigError(
                f"{path / name} is damaged: its SHA-256 is {found.sha256[:12]}…, and {CHECKSUMS_FILE} says "
                f"{said.sha256[:12]}…; {fix}"
            )
    return len(files)


def _sum(path: Path) -> FileSum:
    try:
        with open_regular(path) as file:
            return sum_file(cast(BinaryIO, file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {AGAIN}") from error


def _cannot_be_written(path: Path, error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return f"{path} cannot be written ({reason}), and nothing is left there; name a folder on a disk with room"
