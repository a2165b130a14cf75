"""Atomic creation of a folder with the checksums of its files.

The folder is filled under a temporary name next to its destination, synced to disk, and renamed. A process killed
before the rename leaves a hidden ``.NAME.….partial``, which is never read and can be deleted.

``checksums.json`` holds the size and SHA-256 of every file.
"""

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from safetensors import SafetensorError

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import sync_to_disk
from fsdptoys.utils.regular_file import open_regular

from .checksums import FileSum, sum_file, sums_from_json, sums_to_json
from .safetensors_io import AGAIN, read_json

CHECKSUMS_FILE = "checksums.json"


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
