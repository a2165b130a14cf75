"""Many files as one stream of tokens, none of it held in memory.

A read of plain files opens those that the window crosses and closes them again: no file is kept
open or passed through a fork, and the page cache does the rest. Shards of prepared folders are
mapped instead. Every token read is checked against the vocabulary.
"""

import bisect
import functools
import glob
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

HEAD_BYTES = 2**20  # start of each file, checked before ranks start
SAMPLE_BYTES = 4096  # start and end of each file in the fingerprint
MOST_MAPS = 256
"""Files mapped at a time; a map takes a file descriptor, of which a process may have 1024."""


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


@functools.lru_cache(MOST_MAPS)
def map_file(path: str, dtype: "np.dtype[Any]", count: int) -> NDArray[Any]:
    """Map the ``count`` items of a file; ValueError if it is shorter."""
    return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray)


class FileStream:
    """Tokens of several files, one after the other, with the token ``separator`` between two,
    unless None.

    ``key`` is the configuration's, for messages. Each file is a whole number of tokens, all below
    ``vocab_size``. ``mapped`` files stay mapped between reads.
    """

    def __init__(
        self,
        key: str,
        files: list[SourceFile],
        dtype: "np.dtype[Any]",
        vocab_size: int,
        separator: int | None = None,
        mapped: bool = False,
    ) -> None:
        self.key = key
        self.files = files
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.separator = separator
        self.mapped = mapped
        self.file_tokens = [file.size_bytes // dtype.itemsize for file in files]
        gap = 0 if separator is None else 1
        self.starts = list(
            itertools.accumulate(
                (tokens + gap for tokens in self.file_tokens), initial=0
            )
        )[:-1]
        """Position in the stream of each file's first token."""

    def __len__(self) -> int:
        return self.starts[-1] + self.file_tokens[-1] if self.files else 0

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens within the stream; ConfigError if a file is gone or shorter, or a token is outside
        the vocabulary."""
        assert start >= 0 and start + count <= len(self)
        tokens = np.full(count, self.separator or 0, self.dtype)
        stop = start + count
        index = bisect.bisect_right(self.starts, start) - 1
        while index < len(self.files) and self.starts[index] < stop:
            file_start = self.starts[index]
            low, high = (
                max(start, file_start),
                min(stop, file_start + self.file_tokens[index]),
            )
            if low < high:  # else the window starts at the separator after this file
                tokens[low - start : high - start] = self._read_file(
                    index, low - file_start, high - low
                )
            index += 1
        return tokens

    def check_heads(self) -> None:
        """Read the first MiB of every file; errors as ``read``."""
        for index, tokens in enumerate(self.file_tokens):
            self._read_file(index, 0, min(tokens, HEAD_BYTES // self.dtype.itemsize))

    def content_sample(self) -> bytes:
        """Start and end of every file, for a cheap fingerprint without the bytes between them."""
        sample = bytearray()
        tokens_each = SAMPLE_BYTES // self.dtype.itemsize
        for index, tokens in enumerate(self.file_tokens):
            count = min(tokens, tokens_each)
            sample += self._read_file(index, 0, count).tobytes()
            sample += self._read_file(index, tokens - count, count).tobytes()
        return bytes(sample)

    def _read_file(self, index: int, offset: int, count: int) -> NDArray[Any]:
        path = self.files[index].path
        try:
            if self.mapped:
                whole = map_file(path, self.dtype, self.file_tokens[index])
                tokens = whole[offset : offset + count]
            else:
                tokens = np.fromfile(
                    path, self.dtype, count, offset=offset * self.dtype.itemsize
                )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise ConfigError(
                f"{self.key}=[{path}] can no longer be read ({reason}); restore it or change "
                f"{self.key}"
            ) from error
        if len(tokens) < count:
            raise ConfigError(
                f"{self.key}=[{path}] has fewer than the {self.files[index].size_bytes} bytes it "
                "had when the run started; restore it"
            )
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            first = int(np.flatnonzero(tokens >= self.vocab_size)[0])
            token = int(tokens[first])
            raise ConfigError(
                f"{self.key}=[{path}] has token {token} at position {offset + first}, outside "
                f"model.vocab_size={self.vocab_size}; set model.vocab_size to at least "
                f"{token + 1}, or repair the file or data.dtype"
            )
        return tokens
