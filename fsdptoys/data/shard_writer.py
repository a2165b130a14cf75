"""Write token shards, resumably, into a folder that becomes a dataset when it is complete.

Everything goes into ``NAME.part``, which is renamed to ``NAME`` once its index is on the disk.
Every few MiB a ``progress.json`` records the documents read and the length of each file; the next
start cuts the files to that length and continues after these documents, so that the result has the
bytes of an uninterrupted one.
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
from fsdptoys.utils.sealed_folder import RunningSum, seal_folder, sum_bytes

from . import dataset_index as layout
from .dataset import Tokens
from .dataset_index import MOST_COUNT, Index, Shard

PROGRESS_FILE = "progress.json"
SAVE_TOKENS = 2**24  # ids between two records of the progress


@dataclass
class ShardProgress:
    """A shard as far as it is on the disk."""

    name: str
    split: str
    tokens: int = field(metadata=between(0, MOST_COUNT))
    documents: int = field(metadata=between(0, MOST_COUNT))
    closed: bool

    def __post_init__(self) -> None:
        if not (layout.SHARD_NAME.fullmatch(self.name) and self.split in layout.SPLITS):
            raise ForeignError("a shard has no valid name or split")


@dataclass
class Progress:
    """Content of ``progress.json``."""

    request: str  # fingerprint of the request
    documents: int = field(metadata=between(0, MOST_COUNT))
    """Documents read, of all sources, from the first on."""
    left_out: int = field(metadata=between(0, MOST_COUNT))  # documents without text among them
    shards: list[ShardProgress]  # as of the last ``save``


class ShardsWriter:
    """Writes documents into shards of a dataset ``folder``; the files go into ``NAME.part`` next to
    it.

    The part of another ``request`` (a fingerprint) is deleted. ``dtype`` is that of an id, as the
    index names it; a shard ends with the document that brings it to ``shard_tokens`` ids. With
    ``learned`` each id has a byte that says whether it counts as a label.
    """

    def __init__(
        self, folder: Path, request: str, dtype: str, shard_tokens: int, learned: bool = False
    ) -> None:
        self.folder = folder
        self.part = folder.with_name(folder.name + ".part")
        self.shard_tokens = shard_tokens
        self.progress = Progress(request, 0, 0, [])
        self._dtypes = [
            layout.DTYPES[dtype],
            layout.ENDS_DTYPE,
            *([layout.LEARNED_DTYPE] if learned else []),
        ]
        self._shards: list[_OpenShard] = []
        self._unsaved = 0
        self.resumed = self._resume()  # whether an interrupted writing continues

    @property
    def tokens(self) -> int:
        """Ids so far, over all splits."""
        return sum(shard.tokens for shard in self._shards)

    def add(
        self, split: str, ids: NDArray[Any], lengths: Tokens, learned: NDArray[Any] | None = None
    ) -> None:
        """Append documents to a split: the ids of all, one after the other with the end of each,
        and their lengths."""
        stops = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            start = int(stops[first - 1]) if first else 0
            shard = self._open(split)
            filled = int(np.searchsorted(stops, start + self.shard_tokens - shard.tokens))
            last = min(filled, len(lengths) - 1)
            own = slice(start, int(stops[last]))
            shard.append(
                ids[own], stops[first : last + 1] - start, None if learned is None else learned[own]
            )
            if shard.tokens >= self.shard_tokens:
                shard.close()
            first = last + 1
        self._unsaved += len(ids)

    def add_long(self, split: str, blocks: Iterable[NDArray[Any]]) -> None:
        """Append one document to a split: its ids in parts, with the end of the document."""
        shard = self._open(split)
        before = shard.tokens
        for ids in blocks:
            shard.append(ids, np.empty(0, np.int64))
        shard.append(np.empty(0, np.int64), np.zeros(1, np.int64))
        if shard.tokens >= self.shard_tokens:
            shard.close()
        self._unsaved += shard.tokens - before

    def read(self, documents: int, left_out: int) -> None:
        """Count documents as done: everything added so far came from these and earlier ones."""
        self.progress.documents += documents
        self.progress.left_out += left_out
        if self._unsaved >= SAVE_TOKENS:
            self.save()

    def save(self) -> None:
        """Flush everything added so far to the disk and record it as progress."""
        for shard in self._shards:
            shard.flush()
        self._unsaved = 0
        self.progress.shards = [shard.progress() for shard in self._shards]
        write_atomically(
            self.part / PROGRESS_FILE, json.dumps(dataclasses.asdict(self.progress)), sync=True
        )

    def finish(self, index: Index, tokenizer: bytes | None = None) -> Index:
        """Turn the part into a dataset, with the tokenizer's file; sets shards and ``left_out`` of
        ``index``."""
        if tokenizer is not None:
            write_atomically(self.part / layout.TOKENIZER_FILE, tokenizer)
            index = dataclasses.replace(index, tokenizer_file_sha256=sum_bytes(tokenizer).sha256)
        for shard in self._shards:
            shard.close()
        shards = tuple(shard.entry() for shard in self._shards)
        index = dataclasses.replace(index, left_out=self.progress.left_out, shards=shards)
        content = index.to_json()
        seal_folder(self.part, self.folder, layout.INDEX_FILE, content, drop=[PROGRESS_FILE])
        return index

    def close(self) -> None:
        """Close the files; ids since the last ``save`` may be lost."""
        for shard in self._shards:
            shard.abandon()

    def _open(self, split: str) -> "_OpenShard":
        last = next((shard for shard in reversed(self._shards) if shard.split == split), None)
        if last is None or last.closed:
            last = _OpenShard(self.part, f"shard-{len(self._shards):05d}", split, self._dtypes)
            self._shards.append(last)
        return last

    def _resume(self) -> bool:
        try:
            progress = build(
                Progress,
                parse_json(read_regular(self.part / PROGRESS_FILE, layout.MOST_INDEX_BYTES)),
            )
            if progress.request == self.progress.request:
                for noted in progress.shards:
                    self._shards.append(_OpenShard.reopen(self.part, noted, self._dtypes))
                kept = {PROGRESS_FILE}.union(*(shard.file_names for shard in self._shards))
                for path in self.part.iterdir():
                    if path.name not in kept:
                        path.unlink()
                self.progress = progress
                return True
        except (OSError, ValueError):
            self.close()
            self._shards = []
        if self.part.is_symlink():
            self.part.unlink()
        elif self.part.exists():
            shutil.rmtree(self.part)
        self.part.mkdir(parents=True)
        return False


class _OpenShard:
    """Two or three files, whose items have ``dtypes``, and their checksums so far."""

    def __init__(
        self, folder: Path, name: str, split: str, dtypes: "list[np.dtype[Any]]", mode: str = "xb"
    ) -> None:
        self.name, self.split = name, split
        self.tokens = self.documents = 0
        self.closed = False
        self._dtypes = dtypes
        self.file_names = layout.shard_files(name, learned=len(dtypes) > 2)
        self._files: list[IO[bytes]] = [
            open_regular(folder / file, mode) for file in self.file_names
        ]
        self._sums = [RunningSum() for _ in dtypes]

    @classmethod
    def reopen(
        cls, folder: Path, noted: ShardProgress, dtypes: "list[np.dtype[Any]]"
    ) -> "_OpenShard":
        """Restore a shard to its recorded progress; ValueError if its files are shorter."""
        shard = cls(folder, noted.name, noted.split, dtypes, "r+b")
        shard.tokens, shard.documents = noted.tokens, noted.documents
        counts = (shard.tokens, shard.documents, shard.tokens)
        for file, file_sum, count, dtype in zip(
            shard._files, shard._sums, counts, dtypes, strict=False
        ):
            size = count * dtype.itemsize
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{file.name} is shorter than it was")
            file.truncate(size)
            file_sum.read(file)
        if noted.closed:
            shard.close()
        return shard

    def append(self, ids: NDArray[Any], stops: Tokens, learned: NDArray[Any] | None = None) -> None:
        """Add ids, the end of each document among these, and which ids are learned."""
        parts = [ids, stops + self.tokens, *([] if learned is None else [learned])]
        for file, file_sum, dtype, values in zip(
            self._files, self._sums, self._dtypes, parts, strict=True
        ):
            part = values.astype(dtype, copy=False)
            file.write(part.data)
            file_sum.update(part.data)
        self.tokens += len(ids)
        self.documents += len(stops)

    def flush(self) -> None:
        for file in self._files:
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """End it; may be called twice."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close its files without a flush to the disk."""
        self.closed = True
        for file in self._files:
            file.close()

    def progress(self) -> ShardProgress:
        return ShardProgress(self.name, self.split, self.tokens, self.documents, self.closed)

    def entry(self) -> Shard:
        sums = (file_sum.result().sha256 for file_sum in self._sums)
        return Shard(self.name, self.split, self.tokens, self.documents, *sums)
