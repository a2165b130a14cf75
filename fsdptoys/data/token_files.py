"""Files of tokens: how many each holds, and the tokens at an offset.

``TokenStream`` reads any ``TokenFile``, so a format of its own is one class. ``BinaryFile`` reads
ids of a fixed width. A read of a plain file opens it and closes it again: no file is kept open or
passed through a fork, and the page cache does the rest. Shards of prepared folders are mapped
instead.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

from .source_files import SourceFile

MOST_MAPS = 256
"""Files mapped at a time; a map takes a file descriptor, and a process may have only 1024."""


@functools.lru_cache(MOST_MAPS)
def map_file(path: str, dtype: "np.dtype[Any]", count: int) -> NDArray[Any]:
    """Map the ``count`` items of a file; ValueError if it is shorter."""
    return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray)


@dataclass(frozen=True)
class TokenFile(ABC):
    """Tokens of one file."""

    key: str  # of the configuration, for messages
    source: SourceFile
    dtype: "np.dtype[Any]"

    @property
    def owner(self) -> str:
        """The file for messages."""
        return f"{self.key}=[{self.source.path}]"

    @abstractmethod
    def __len__(self) -> int:
        """Number of tokens."""

    @abstractmethod
    def read(self, offset: int, count: int) -> NDArray[Any]:
        """Tokens within the file; ConfigError if it is gone or shorter."""


@dataclass(frozen=True)
class BinaryFile(TokenFile):
    """A whole number of tokens, without a header; a ``mapped`` file stays mapped between reads."""

    mapped: bool = False

    def __len__(self) -> int:
        return self.source.size_bytes // self.dtype.itemsize

    def read(self, offset: int, count: int) -> NDArray[Any]:
        """See ``TokenFile``."""
        path = self.source.path
        try:
            if self.mapped:
                tokens = map_file(path, self.dtype, len(self))[offset : offset + count]
            else:
                start = offset * self.dtype.itemsize
                tokens = np.fromfile(path, self.dtype, count, offset=start)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise ConfigError(
                f"{self.owner} can no longer be read ({reason}); restore it or change {self.key}"
            ) from error
        if len(tokens) < count:
            raise ConfigError(
                f"{self.owner} has fewer than the {self.source.size_bytes} bytes it had when the "
                "run started; restore it"
            )
        return tokens
