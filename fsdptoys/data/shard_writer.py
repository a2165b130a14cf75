"""Shards being written, in a folder that is not yet a data set, and where an interrupted writing goes on.

Everything goes into ``NAME.part``, which becomes ``NAME`` by one rename when its index is on the disk. Every few MiB a
``progress.json`` says how many documents were read and how long each file was then; who comes back cuts the files to
that length and goes on after these documents, so that the result has the bytes of one that was never interrupted.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import open_regular, read_regular

from .dataset import Tokens
from .dataset_index import (
    BLOCK_BYTES,
    DTYPES,
    ENDS_DTYPE,
    INDEX_FILE,
    MOST_INDEX_BYTES,
    SPLITS,
    TOKENIZER_FILE,
    Index,
    Shard,
    checked_count,
    ends_file,
    is_shard_name,
    shard_name,
    sync_folder,
    tokens_file,
)

PROGRESS_FILE = "progress.json"
SAVE_TOKENS = 2**24
"""So many ids from one note of the progress to the next."""


@dataclass
class Progress:
    """What has been read."""

    documents: int = 0
    """Of all sources, from the first on."""
    left_out: int = 0
    """Documents without text among them."""


class ShardsWriter:
    """Documents go in, shards come out.

    Args:
        folder: of the data set that is to be; what is written goes beside it.
        request: hash of what is asked for: another's rest is thrown away.
        dtype: number format of an id, as the index calls it.
        shard_tokens: a shard ends with the document that brings it to so many.
    """

    def __init__(self, folder: Path, request: str, dtype: str, shard_tokens: int) -> None:
        self.folder = folder
        self.part = folder.with_name(folder.name + ".part")
        self.request = request
        self.shard_tokens = shard_tokens
        self.progress = Progress()
        self._dtype = DTYPES[dtype]
        self._shards: list[_OpenShard] = []
        self._unsaved = 0
        self.resumed = self._resume()
        """Whether there was something to go on from."""

    @property
    def tokens(self) -> int:
        """Ids so far, of all splits."""
        return sum(shard.tokens for shard in self._shards)

    def add(self, split: str, ids: NDArray[Any], lengths: Tokens) -> None:
        """Append documents to a split.

        Args:
            split: whose.
            ids: of all of them, one after the other, ends of documents included.
            lengths: of each.
        """
        stops = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            start = int(stops[first - 1]) if first else 0
            shard = self._open(split)
            filled = int(np.searchsorted(stops, start + self.shard_tokens - shard.tokens))
            last = min(filled, len(lengths) - 1)
            shard.append(ids[start : stops[last]], stops[first : last + 1] - start)
            if shard.tokens >= self.shard_tokens:
                shard.close()
            first = last + 1
        self._unsaved += len(ids)

    def add_long(self, split: str, blocks: Iterable[NDArray[Any]]) -> None:
        """Append one document to a split.

        Args:
            split: whose.
            blocks: its ids, the end of the document included, some at a time.
        """
        shard = self._open(split)
        before = shard.tokens
        for ids in blocks:
            shard.extend(ids)
        shard.end_document()
        if shard.tokens >= self.shard_tokens:
            shard.close()
        self._unsaved += shard.tokens - before

    def read(self, documents: int, left_out: int) -> None:
        """Note that so many documents are done with: all that was added came from these and earlier ones."""
        self.progress.documents += documents
        self.progress.left_out += left_out
        if self._unsaved >= SAVE_TOKENS:
            self.save()

    def save(self) -> None:
        """Have all that went in on the disk, and note how far it goes."""
        for shard in self._shards:
            shard.flush()
        self._unsaved = 0
        notes = {"request": self.request} | dataclasses.asdict(self.progress)
        notes["shards"] = [shard.note() for shard in self._shards]
        _write(self.part / PROGRESS_FILE, json.dumps(notes).encode())

    def finish(self, index: Index, tokenizer: bytes | None = None) -> Index:
        """Turn what was written into a data set.

        Args:
            index: all but its shards, the number of documents that were left out, and the sum of the tokenizer's file.
            tokenizer: content of that file, of which the folder keeps a copy.
        """
        if tokenizer is not None:
            _write(self.part / TOKENIZER_FILE, tokenizer)
            index = dataclasses.replace(index, tokenizer_file_sha256=hashlib.sha256(tokenizer).hexdigest())
        for shard in self._shards:
            shard.close()
        shards = tuple(shard.entry() for shard in self._shards)
        index = dataclasses.replace(index, left_out=self.progress.left_out, shards=shards)
        _write(self.part / INDEX_FILE, index.to_json().encode())
        (self.part / PROGRESS_FILE).unlink(missing_ok=True)
        sync_folder(self.part)
        self.part.rename(self.folder)
        sync_folder(self.folder.parent)
        return index

    def close(self) -> None:
        """Let go of the files; what was not saved may be lost."""
        for shard in self._shards:
            shard.abandon()

    def _open(self, split: str) -> "_OpenShard":
        last = next((shard for shard in reversed(self._shards) if shard.split == split), None)
        if last is None or last.closed:
            last = _OpenShard(self.part, shard_name(len(self._shards)), split, self._dtype)
            self._shards.append(last)
        return last

    def _resume(self) -> bool:
        try:
            notes = parse_json(read_regular(self.part / PROGRESS_FILE, MOST_INDEX_BYTES))
            if notes["request"] == self.request:
                progress = Progress(checked_count(notes["documents"]), checked_count(notes["left_out"]))
                for note in notes["shards"]:
                    self._shards.append(_OpenShard.again(self.part, note, self._dtype))
                self._remove_unnoted()
                self.progress = progress
                return True
        except (OSError, ValueError, KeyError, TypeError):
            self.close()
            self._shards = []
        if self.part.is_symlink():
            self.part.unlink()
        elif self.part.exists():
            shutil.rmtree(self.part)
        self.part.mkdir(parents=True)
        return False

    def _remove_unnoted(self) -> None:
        noted = {name for shard in self._shards for name in (tokens_file(shard.name), ends_file(shard.name))}
        for path in self.part.iterdir():
            if path.name not in noted | {PROGRESS_FILE}:
                path.unlink()


class _OpenShard:
    """Two files and their sums so far."""

    def __init__(self, folder: Path, name: str, split: str, dtype: "np.dtype[Any]", mode: str = "xb") -> None:
        self.name, self.split = name, split
        self.tokens = self.documents = 0
        self.closed = False
        self._dtype = dtype
        self._files: list[IO[bytes]] = []
        for file in (tokens_file(name), ends_file(name)):
            self._files.append(open_regular(folder / file, mode))
        self._sums = [hashlib.sha256(), hashlib.sha256()]

    @classmethod
    def again(cls, folder: Path, note: dict[str, Any], dtype: "np.dtype[Any]") -> "_OpenShard":
        """The shard as it was when it was noted.

        Raises:
            ValueError: if its files are shorter than that, or the note is not one of ``note``.
        """
        if not (is_shard_name(note["name"]) and note["split"] in SPLITS and type(note["closed"]) is bool):
            raise ValueError("a shard has no valid name or split")
        shard = cls(folder, note["name"], note["split"], dtype, "r+b")
        shard.tokens, shard.documents = checked_count(note["tokens"]), checked_count(note["documents"])
        sizes = (shard.tokens * dtype.itemsize, shard.documents * ENDS_DTYPE.itemsize)
        for file, digest, size in zip(shard._files, shard._sums, sizes, strict=True):
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{file.name} is shorter than it was")
            file.truncate(size)
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        if note["closed"]:
            shard.close()
        return shard

    def append(self, ids: NDArray[Any], stops: Tokens) -> None:
        """Add documents, given their ids and where each ends among these."""
        parts = (ids.astype(self._dtype, copy=False), (stops + self.tokens).astype(ENDS_DTYPE))
        for file, digest, part in zip(self._files, self._sums, parts, strict=True):
            file.write(part.data)
            digest.update(part.data)
        self.tokens += len(ids)
        self.documents += len(stops)

    def extend(self, ids: NDArray[Any]) -> None:
        """Add ids of a document that ``end_document`` ends."""
        part = ids.astype(self._dtype, copy=False)
        self._files[0].write(part.data)
        self._sums[0].update(part.data)
        self.tokens += len(ids)

    def end_document(self) -> None:
        """Note the end of a document that ``extend`` has added."""
        self.append(np.empty(0, self._dtype), np.zeros(1, np.int64))

    def flush(self) -> None:
        """Have it on the disk."""
        for file in self._files:
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """End it; may be called twice."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close its files as they are."""
        self.closed = True
        for file in self._files:
            file.close()

    def note(self) -> dict[str, Any]:
        """What ``again`` needs."""
        names = ("name", "split", "tokens", "documents", "closed")
        return {name: getattr(self, name) for name in names}

    def entry(self) -> Shard:
        """What the index says of it."""
        sha256, ends_sha256 = (digest.hexdigest() for digest in self._sums)
        return Shard(self.name, self.split, self.tokens, self.documents, sha256, ends_sha256)


def _write(path: Path, content: bytes) -> None:
    """Put a small file in place at once, whole."""
    part = path.with_name(path.name + ".new")
    with open_regular(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
