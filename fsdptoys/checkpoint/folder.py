"""A folder that is there as a whole or not at all, with the checksums of its files.

It is filled under another name beside its place, handed to the disk, and renamed. A process that is killed before the
rename leaves a hidden ``.NAME.….partial`` behind, which nothing reads and anybody may delete.

safetensors has no checksums of its own: of 300 flipped bits its reader noticed one. ``checksums.json`` names size and
SHA-256 of every file; it protects against damage, not against somebody who rewrites it too.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fsdptoys.errors import ConfigError

from .headers import AGAIN
from .tensors import is_file_name, read_json

CHECKSUMS_FILE = "checksums.json"
BLOCK_BYTES = 2**20


def check_new_folder(path: Path) -> None:
    """Check that a folder can be made there, or is there and empty.

    Raises:
        ConfigError: naming the folder.
    """
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    if taken:
        what = "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(f"{path} {what}, and nothing is written over; name a folder that does not exist")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that takes its place, with checksums, when the block ends well, and is deleted otherwise.

    Raises:
        ConfigError: in one sentence, if the place is taken or the system refuses to write.
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
        _write_checksums(temporary)
        for file in temporary.iterdir():
            _hand_to_disk(file)
        _hand_to_disk(temporary)
        temporary.rename(place)
        _hand_to_disk(place.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(_cannot_be_written(path, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify_checksums(path: Path) -> int | None:
    """Hold every file of a folder against its checksums.

    Returns:
        The number of files that match; None where the folder has no checksums.

    Raises:
        ConfigError: naming the file that is damaged.
    """
    if not (path / CHECKSUMS_FILE).exists():
        return None
    files = _read_checksums(path)
    for name, (size, digest) in files.items():
        check_size(path, name, size)
        found = _digest(path / name)
        if found != digest:
            raise ConfigError(
                f"{path / name} is damaged: its SHA-256 is {found[:12]}…, and {CHECKSUMS_FILE} says {digest[:12]}…; "
                f"{AGAIN}, or delete {CHECKSUMS_FILE} if the file was changed on purpose"
            )
    return len(files)


def check_sizes(path: Path) -> None:
    """Hold the sizes of a folder's files against its checksums, if it has any, without reading the files."""
    if (path / CHECKSUMS_FILE).exists():
        for name, (size, _) in _read_checksums(path).items():
            check_size(path, name, size)


def check_size(path: Path, name: str, size: int) -> None:
    """Refuse a file that is gone or has another size."""
    try:
        found = (path / name).stat().st_size
    except OSError as error:
        raise ConfigError(f"{path / name} is not there, though {CHECKSUMS_FILE} speaks of it; {AGAIN}") from error
    if found != size:
        raise ConfigError(
            f"{path / name} is damaged: it holds {found} bytes, and {CHECKSUMS_FILE} says {size}; {AGAIN}, or delete "
            f"{CHECKSUMS_FILE} if the file was changed on purpose"
        )


def _read_checksums(path: Path) -> dict[str, tuple[int, str]]:
    manifest = path / CHECKSUMS_FILE
    try:
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in read_json(manifest)["files"].items()}
        if not all(is_file_name(n) and type(size) is int and isinstance(d, str) for n, (size, d) in files.items()):
            raise ValueError
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{manifest} is damaged: it does not list names, sizes and SHA-256; {AGAIN}") from error
    return files


def _write_checksums(folder: Path) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(folder.iterdir())}
    text = json.dumps({"files": files}, indent=2) + "\n"
    (folder / CHECKSUMS_FILE).write_text(text, encoding="utf-8")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {AGAIN}") from error
    return digest.hexdigest()


def _hand_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems refuse this for folders.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _cannot_be_written(path: Path, error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return f"{path} cannot be written ({reason}), and nothing is left there; name a folder on a disk with room"
