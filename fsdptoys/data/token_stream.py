"""Many files as one stream of tokens, none of it held in memory.

Every token read is checked against the vocabulary.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

from .token_files import TokenFile

HEAD_BYTES = 2**20  # start of each file, checked before ranks start
SAMPLE_BYTES = 4096  # start and end of each file in the fingerprint


class TokenStream:
    """Tokens of several files, one after the other.

    Between two is the token ``separator``, unless None. All are below ``vocab_size``.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        vocab_size: int,
        separator: int | None = None,
    ) -> None:
        self.files = files
        self.vocab_size = vocab_size
        self.separator = separator
        gap = 0 if separator is None else 1
        lengths = (len(file) + gap for file in files)
        self.starts = list(itertools.accumulate(lengths, initial=0))[:-1]
        """Position in the stream of each file's first token."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """dtype of all files."""
        return self.files[0].dtype

    def __len__(self) -> int:
        return self.starts[-1] + len(self.files[-1]) if self.files else 0

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens within the stream; ConfigError if a file is gone or shorter, or a token is outside
        the vocabulary."""
        assert start >= 0 and start + count <= len(self)
        tokens = np.full(count, self.separator or 0, self.dtype)
        stop = start + count
        index = bisect.bisect_right(self.starts, start) - 1
        while index < len(self.files) and self.starts[index] < stop:
            file = self.files[index]
            file_start = self.starts[index]
            low = max(start, file_start)
            high = min(stop, file_start + len(file))
            if low < high:  # else the window starts at the separator after this file
                tokens[low - start : high - start] = self._read_file(
                    file, low - file_start, high - low
                )
            index += 1
        return tokens

    def check_heads(self) -> None:
        """Read the first MiB of every file; errors as ``read``."""
        for file in self.files:
            self._read_file(file, 0, min(len(file), HEAD_BYTES // self.dtype.itemsize))

    def content_sample(self) -> bytes:
        """Start and end of every file, for a cheap fingerprint without the bytes between them."""
        sample = bytearray()
        for file in self.files:
            count = min(len(file), SAMPLE_BYTES // self.dtype.itemsize)
            sample += self._read_file(file, 0, count).tobytes()
            sample += self._read_file(file, len(file) - count, count).tobytes()
        return bytes(sample)

    def _read_file(self, file: TokenFile, offset: int, count: int) -> NDArray[Any]:
        tokens = file.read(offset, count)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            first = int(np.flatnonzero(tokens >= self.vocab_size)[0])
            token = int(tokens[first])
            raise ConfigError(
                f"{file.owner} has token {token} at position {offset + first}, outside "
                f"model.vocab_size={self.vocab_size}; set model.vocab_size to at least "
                f"{token + 1}, or repair the file or data.dtype"
            )
        return tokens
