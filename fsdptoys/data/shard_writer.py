"""Write token shards, resumably, into a folder that becomes a dataset when it is complete.

Everything goes into ``NAME.part``, which is renamed to ``NAME`` once its index is on the disk.
Every few MiB a ``progress.json`` records the documents read and the length of each file; the next
start cuts the files to that length and continues after these documents, so that the result has the
bytes of an uninterrupted one. Checksums are of the finished files, read again at the end.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.bounds import between
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import open_regular, read_regular
from fsdptoys.utils.sealed_folder import seal_folder, sum_bytes, sum_path

from . import dataset_index as layout
from .dataset import Tokens
from .dataset_index import MOST_COUNT, Index, Shard
from .token_files import map_file

PROGRESS_FILE = "progress.json"
SAVE_TOKENS = 2**24  # ids between two records of the progress


@dataclass
class ShardProgress:
    """A shard so far."""

    name: str
    split: str
    tokens: int = field(default=0, metadata=between(0, MOST_COUNT))
    documents: int = field(default=0, metadata=between(0, MOST_COUNT))

    def __post_init__(self) -> None:
        if not (layout.SHARD_NAME.fullmatch(self.name) and self.split in layout.SPLITS):
            raise ForeignError("a shard has no valid name or split")


@dataclass
class Progress:
    """Content of ``progress.json``."""

    request: str  # fingerprint of the request
    documents: int = field(metadata=between(0, MOST_COUNT))
    """Documents read, of all sources, from the first on."""
    # documents without text among them
    left_out: int = field(metadata=between(0, MOST_COUNT))
    shards: list[ShardProgress]


class ShardsWriter:
    """Writes documents into shards of a dataset ``folder``; the files go into ``NAME.part`` next to
    it.

    The part of another ``request`` (a fingerprint) is deleted. ``dtype`` is that of an id, as the
    index names it; a shard ends with the document that brings it to ``shard_tokens`` ids. With
    ``learned`` each id has a byte that says whether it counts as a label.
    """

    def __init__(
        self,
        folder: Path,
        request: str,
        dtype: str,
        shard_tokens: int,
        learned: bool = False,
    ) -> None:
        self.folder = folder
        self.part = folder.with_name(folder.name + ".part")
        self.shard_tokens = shard_tokens
        self.progress = Progress(request, 0, 0, [])
        self._dtypes: dict[str, np.dtype[Any]] = {
            ".bin": layout.DTYPES[dtype],
            ".ends": layout.ENDS_DTYPE,
        }
        if learned:
            self._dtypes[".learned"] = layout.LEARNED_DTYPE
        self._files: dict[str, list[IO[bytes]]] = {}  # open files by the shard's name
        self.resumed = self._resume()  # whether an interrupted writing continues
        self._saved_tokens = self.tokens

    @property
    def tokens(self) -> int:
        """Ids so far, over all splits."""
        return sum(shard.tokens for shard in self.progress.shards)

    def add(
        self,
        split: str,
        ids: NDArray[Any],
        lengths: Tokens,
        learned: NDArray[Any] | None = None,
    ) -> None:
        """Append documents to a split: the ids of all, one after the other with the end of each,
        and their lengths."""
        stops = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            start = int(stops[first - 1]) if first else 0
            shard = self._open(split)
            filled = int(
                np.searchsorted(stops, start + self.shard_tokens - shard.tokens)
            )
            last = min(filled, len(lengths) - 1)
            own = slice(start, int(stops[last]))
            marks = None if learned is None else learned[own]
            self._append(shard, ids[own], stops[first : last + 1] - start, marks)
            first = last + 1

    def add_long(self, split: str, blocks: Iterable[NDArray[Any]]) -> None:
        """Append one document to a split: its ids in parts, with the end of the document."""
        shard = self._open(split)
        for ids in blocks:
            self._append(shard, ids, np.empty(0, np.int64))
        self._append(shard, np.empty(0, np.int64), np.zeros(1, np.int64))

    def read(self, documents: int, left_out: int) -> None:
        """Count documents as done: everything added so far came from these and earlier ones."""
        self.progress.documents += documents
        self.progress.left_out += left_out
        if self.tokens - self._saved_tokens >= SAVE_TOKENS:
            self.save()

    def save(self) -> None:
        """Flush everything added so far to the disk and record it as progress."""
        for files in self._files.values():
            _sync(files)
        self._saved_tokens = self.tokens
        write_atomically(
            self.part / PROGRESS_FILE,
            json.dumps(dataclasses.asdict(self.progress)),
            sync=True,
        )

    def finish(self, index: Index, tokenizer: bytes | None = None) -> Index:
        """Turn the part into a dataset, with the tokenizer's file; sets shards and ``left_out`` of
        ``index``."""
        if tokenizer is not None:
            write_atomically(self.part / layout.TOKENIZER_FILE, tokenizer)
            index = dataclasses.replace(
                index, tokenizer_file_sha256=sum_bytes(tokenizer).sha256
            )
        self.close()
        shards = []
        for shard in self.progress.shards:
            sums = [sum_path(path).sha256 for path in self._paths(shard)]
            shards.append(
                Shard(shard.name, shard.split, shard.tokens, shard.documents, *sums)
            )
        index = dataclasses.replace(
            index, left_out=self.progress.left_out, shards=tuple(shards)
        )
        content = index.to_json()
        seal_folder(
            self.part, self.folder, layout.INDEX_FILE, content, drop=[PROGRESS_FILE]
        )
        map_file.cache_clear()  # of the shards that were here before
        return index

    def close(self) -> None:
        """Close the files; a crash may lose the ids since the last ``save``."""
        for files in self._files.values():
            for file in files:
                file.close()
        self._files = {}

    def _paths(self, shard: ShardProgress) -> list[Path]:
        return [self.part / f"{shard.name}{suffix}" for suffix in self._dtypes]

    def _open(self, split: str) -> ShardProgress:
        """The split's last shard, or a new one if that is full."""
        shards = self.progress.shards
        shard = next(
            (shard for shard in reversed(shards) if shard.split == split), None
        )
        if shard is not None and shard.tokens >= self.shard_tokens:
            files = self._files.pop(shard.name, [])
            _sync(files)
            for file in files:
                file.close()
            shard = None
        if shard is None:
            shard = ShardProgress(f"shard-{len(shards):05d}", split)
            shards.append(shard)
        if shard.name not in self._files:
            self._files[shard.name] = [
                open_regular(path, "ab") for path in self._paths(shard)
            ]
        return shard

    def _append(
        self,
        shard: ShardProgress,
        ids: NDArray[Any],
        stops: Tokens,
        learned: NDArray[Any] | None = None,
    ) -> None:
        """Add ids, the end of each document among these, and which ids are learned."""
        columns = [ids, stops + shard.tokens]
        if learned is not None:
            columns.append(learned)
        for file, dtype, values in zip(
            self._files[shard.name], self._dtypes.values(), columns, strict=True
        ):
            file.write(values.astype(dtype, copy=False).data)
        shard.tokens += len(ids)
        shard.documents += len(stops)

    def _resume(self) -> bool:
        """Continue the recorded progress; without a usable one begin an empty part."""
        try:
            content = read_regular(self.part / PROGRESS_FILE, layout.MOST_INDEX_BYTES)
            progress = build(Progress, parse_json(content), skip_unknown=True)
            if progress.request == self.progress.request:
                paths = {self.part / PROGRESS_FILE}
                for shard in progress.shards:
                    paths.update(self._paths(shard))
                    counts = (shard.tokens, shard.documents, shard.tokens)
                    for path, dtype, count in zip(
                        self._paths(shard), self._dtypes.values(), counts, strict=False
                    ):
                        _shorten(path, count * dtype.itemsize)
                for path in self.part.iterdir():
                    if path not in paths:
                        path.unlink()
                self.progress = progress
                return True
        except (OSError, ValueError):
            pass
        if self.part.is_symlink():
            self.part.unlink()
        elif self.part.exists():
            shutil.rmtree(self.part)
        self.part.mkdir(parents=True)
        return False


def _shorten(path: Path, size: int) -> None:
    """Cut a file to a size; ValueError if it is shorter."""
    with open_regular(path, "r+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            raise ValueError(f"{path} is shorter than it was")
        file.truncate(size)


def _sync(files: Iterable[IO[bytes]]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
