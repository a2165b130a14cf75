"""Find the files that the data is read from, by paths and globs."""

import glob
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass

from fsdptoys.errors import ConfigError

STDLIB = "stdlib"
STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
"""Directories of other packages, or of files in odd encodings."""


@dataclass(frozen=True)
class SourceFile:
    """An input file."""

    path: str
    name: str  # path below the pattern's directory, independent of the location of the data
    size_bytes: int
    is_folder: bool = False  # of the package datasets


def match_files(key: str, pattern: str) -> list[SourceFile]:
    """Find the files of a path or a glob (``**`` for any depth), sorted by path; an existing path
    is never a glob.

    ConfigError if nothing matches, or a file is empty, not regular or not readable.
    """
    path = os.path.expanduser(pattern)
    magic = re.search(r"[*?\[]", path)
    if magic is None or os.path.exists(path):
        source = source_file(key, path, os.path.dirname(path))
        require_content(key, source)
        return [source]
    root = os.path.dirname(path[: magic.start()])
    paths = sorted(
        match for match in glob.glob(path, recursive=True) if not os.path.isdir(match)
    )
    if not paths:
        raise ConfigError(
            f"{key}=[{pattern}] matches no file; set {key} to paths or globs of files that "
            f"exist, as seen from {os.getcwd()}"
        )
    return [source_file(key, match, root) for match in paths]


def source_file(key: str, path: str, root: str) -> SourceFile:
    """Check one file, named by its path below ``root``; ConfigError if it is missing, not regular
    or not readable."""
    if os.path.isdir(path):
        raise ConfigError(
            f"{key}=[{path}] is a directory; set {key}=[{os.path.join(path, '**')}] for all "
            "files below it"
        )
    if not os.path.exists(path):
        raise ConfigError(
            f"{key}=[{path}] does not exist; set {key} to files that do, as seen from {os.getcwd()}"
        )
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ConfigError(
            f"{key}=[{path}] is not a regular file that this user may read; change its "
            f"permissions or take it out of {key}"
        )
    name = os.path.relpath(path, root or os.curdir).replace(os.sep, "/")
    return SourceFile(path, name, os.path.getsize(path))


def require_content(key: str, file: SourceFile) -> None:
    """Refuse an empty file."""
    if not file.size_bytes:
        raise ConfigError(
            f"{key}=[{file.path}] is an empty file; take it out of {key} or write it again"
        )


def without_repeats(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Each file once, at its first mention; a repeat could be in both splits."""
    by_path: dict[str, SourceFile] = {}
    for file in files:
        by_path.setdefault(os.path.realpath(file.path), file)
    return list(by_path.values())


def stdlib_files() -> list[SourceFile]:
    """Source of the running Python's standard library, without tests and installed packages."""
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - STDLIB_LEFT_OUT)
        paths = (
            os.path.join(directory, name)
            for name in sorted(names)
            if name.endswith(".py")
        )
        # Some distributions have dangling links.
        files += [
            source_file("data.files", path, root)
            for path in paths
            if os.path.isfile(path)
        ]
    return files
