"""Digests of sampled blocks of the data's files, so that a resumed run detects changed files in
milliseconds.

Of each file the first and last 4 KiB are read, and between them one block for every 16 MiB, at
least 16, each at a pseudo-random place of its own stretch. A file of up to 72 KiB is read
completely. All files together have at most 16,384 blocks besides their first and last ones. Times
and inodes do not count: a copy is the same data.

Not covered: a change that misses every sampled block. The probability of detection is about the
length of the change divided by the distance of two blocks: 1 in 4096 for a single byte in the
middle of a large file.
"""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular

from .source_files import SourceFile

VERSION = 1  # of the choice of blocks; digests of other versions are not compared
BLOCK_BYTES = 4096
STRIDE_BYTES = 16 * 2**20  # of a file for each block
LEAST_BLOCKS = 16  # of a file, besides its first and last
MOST_BLOCKS = 2**14  # of all files together, besides the first and last of each
MOST_DIGESTS = 256
DIGEST_CHARACTERS = 16


class SampledFiles:
    """Sampled contents of the training files, in the order of the data."""

    def __init__(self, key: str, files: Sequence[SourceFile]) -> None:
        self._key = key
        count = min(len(files), MOST_DIGESTS)
        edges = [len(files) * number // max(1, count) for number in range(count + 1)]
        digests = _digests(key, files)
        self._groups: list[Sequence[SourceFile]] = []  # a group has one digest
        self._sums: list[str] = []
        for first, stop in itertools.pairwise(edges):
            contents = b"".join(itertools.islice(digests, stop - first))
            self._groups.append(files[first:stop])
            self._sums.append(hashlib.sha256(contents).hexdigest()[:DIGEST_CHARACTERS])

    def state_dict(self) -> dict[str, Any]:
        """Digests for a checkpoint, as JSON values."""
        return {"version": VERSION, "digests": self._sums}

    def check_unchanged(self, state: Any) -> None:
        """Compare the files with a checkpoint's ``state_dict``; a ConfigError names the first
        changed file or group.

        None (of earlier versions) and digests of another choice of blocks or number of files are
        not compared.
        """
        if not isinstance(state, dict) or state.get("version") != VERSION:
            return
        sums = state.get("digests")
        if not isinstance(sums, list) or len(sums) != len(self._sums):
            return
        for group, before, now in zip(self._groups, sums, self._sums, strict=True):
            if before != now:
                owner = f"{self._key}=[{group[0].path}]"
                if len(group) > 1:
                    owner = f"one of the {len(group)} files from {owner} to {group[-1].path}"
                raise ConfigError(
                    f"{owner} has changed since the checkpoint, so that the run cannot continue "
                    "as it began; restore it, or start a new run"
                )


def sampled_offsets(size_bytes: int, blocks: int) -> list[int]:
    """Offsets of the sampled blocks of a file, ascending: the first, the last and ``blocks``
    between them."""
    if size_bytes <= (blocks + 2) * BLOCK_BYTES:
        return list(range(0, size_bytes, BLOCK_BYTES))
    inner = size_bytes - 2 * BLOCK_BYTES
    edges = [BLOCK_BYTES + inner * number // blocks for number in range(blocks + 1)]
    offsets = [0]
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        drawn = hashlib.blake2b(
            repr((VERSION, size_bytes, number)).encode(), digest_size=8
        ).digest()
        offsets.append(
            low + int.from_bytes(drawn, "little") % (high - low - BLOCK_BYTES + 1)
        )
    return [*offsets, size_bytes - BLOCK_BYTES]


def _digests(key: str, files: Sequence[SourceFile]) -> Iterator[bytes]:
    block_counts = [
        max(LEAST_BLOCKS, file.size_bytes // STRIDE_BYTES) for file in files
    ]
    total = sum(block_counts)
    for file, blocks in zip(files, block_counts, strict=True):
        fewer = (
            blocks if total <= MOST_BLOCKS else max(1, blocks * MOST_BLOCKS // total)
        )
        try:
            yield _digest(file, fewer)
        except OSError as error:
            raise ConfigError(
                f"{key}=[{file.path}] cannot be read ({error.strerror or error}); restore it or "
                f"change {key}"
            ) from error


def _digest(file: SourceFile, blocks: int) -> bytes:
    digest = hashlib.sha256(f"{file.size_bytes} ".encode())
    with open_regular(file.path, "rb", buffering=0) as opened:
        for offset in sampled_offsets(file.size_bytes, blocks):
            opened.seek(offset, os.SEEK_SET)
            digest.update(opened.read(BLOCK_BYTES))
    return digest.digest()
