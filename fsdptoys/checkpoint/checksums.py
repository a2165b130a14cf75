"""Checksums of folders of weights.

safetensors has no checksums: its reader noticed 1 of 300 flipped bits.
"""

from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.sealed_folder import sum_path, sums_from_json

from .safetensors_io import AGAIN, read_json

CHECKSUMS_FILE = "checksums.json"  # size and SHA-256 of every file of a folder


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
