"""Rows of whole documents (``data.packing=best_fit``): no document is cut, and little is padded.

A row holds ``seq_len + 1`` ids; the last is only a label. Best fit, longest document
first: each goes into the fullest row with room for it, or into a new one ("Fewer truncations
improve language modeling", arXiv:2404.10830). A document longer than a row is cut into rows of its
own, each starting with the last id of the one before; the rest is packed like a document. Where
only answers are labels, a part of a cut document without any is left out. Padding has the
end-of-document id, and labels that do not count.

Documents are fitted in groups of ``GROUP``, so that memory does not grow with their number. The
result is kept in the cache, in files that all ranks map: once for a folder, a split and a length,
12 bytes a document and 8 a row.
"""

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import between
from fsdptoys.utils.file_lock import hold_lock
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import NotRegularFileError, read_regular
from fsdptoys.utils.sealed_folder import seal_folder

from .dataset import IGNORE_INDEX, Samples, Tokens, hash_of
from .dataset_index import MOST_COUNT, Index, ends_fit, read_ends
from .token_files import map_file
from .token_stream import TokenStream

GROUP = 2**16  # documents fitted together
ROWS_VERSION = 2
COUNTS_FILE = "plan.json"
MOST_COUNTS_BYTES = 2**12
FILES: dict[str, "np.dtype[Any]"] = {
    "starts": np.dtype("<i8"),
    "lengths": np.dtype("<i4"),
    "rows": np.dtype("<i8"),
}
"""Start in the stream and length of each piece, and the number of pieces up to the end of each
row."""
KEY_LENGTH = 24
SHORTEST = 2  # ids of the shortest document with its end; less room is never filled


class Packing(Enum):
    """How documents become samples."""

    none = "none"
    """Windows of the stream, which cross from one document into the next."""
    best_fit = "best_fit"
    """Rows of whole documents; the rest of a row is padded."""


def best_fit(lengths: NDArray[Any], capacity: int) -> list[list[int]]:
    """Assign pieces, of ``SHORTEST`` to ``capacity`` ids, to rows; returns numbers of each row's
    pieces."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: some row has room for exactly r more
    sizes = lengths.tolist()
    for piece in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[piece]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - size
        if left >= SHORTEST:
            with_room[left].append(row)
            rooms |= 1 << left
    return [sorted(row) for row in rows]


def cut(start: int, stops: Tokens, seq_len: int) -> tuple[Tokens, Tokens, NDArray[Any]]:
    """Cut adjacent documents, from position ``start`` on, into pieces that each fit a row.

    Returns starts and lengths of the pieces, and which are cut.
    """
    starts = np.concatenate([[start], stops[:-1]])
    lengths = stops - starts
    counts = np.maximum(1, -(-(lengths - 1) // seq_len))
    owners = np.repeat(np.arange(len(lengths)), counts)
    before = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(seq_len + 1, lengths[owners] - before * seq_len)
    return starts[owners] + before * seq_len, lengths, counts[owners] > 1


@dataclass
class _Counts:
    """Of packed rows, as ``COUNTS_FILE`` has them."""

    rows: int = field(metadata=between(0, MOST_COUNT))
    pieces: int = field(metadata=between(0, MOST_COUNT))
    ids: int = field(metadata=between(0, MOST_COUNT))
    """In all rows, without padding; an id between two pieces of a document counts twice."""


class PackedRows:
    """The ids of each row, mapped from a folder made by ``pack_rows``; ValueError if its files do
    not fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tree = parse_json(read_regular(folder / COUNTS_FILE, MOST_COUNTS_BYTES))
        self.counts = build(_Counts, tree, skip_unknown=True)
        pieces = self.counts.pieces
        items = {"starts": pieces, "lengths": pieces, "rows": self.counts.rows}
        self._files = [
            (str(folder / name), dtype, items[name]) for name, dtype in FILES.items()
        ]
        for path, dtype, count in self._files:
            if os.path.getsize(path) != count * dtype.itemsize:
                raise ValueError(
                    f"{path} does not have the size that {COUNTS_FILE} gives"
                )

    def __len__(self) -> int:
        return self.counts.rows

    def row(self, number: int) -> list[tuple[int, int]]:
        """Position in the stream and length of each piece of a row."""
        starts, lengths, rows = (map_file(*file) for file in self._files)
        first = int(rows[number - 1]) if number else 0
        pieces = slice(first, int(rows[number]))
        return list(zip(starts[pieces].tolist(), lengths[pieces].tolist(), strict=True))


@dataclass
class PackedSamples(Samples):
    """Rows of whole documents as samples."""

    stream: TokenStream
    rows: PackedRows
    seq_len: int
    padding: int  # id that fills the rest of a row
    # 1 for every id that counts as a label; None if all do
    learned: TokenStream | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``; ConfigError if the rows are damaged."""
        ids = np.full(self.seq_len + 1, self.padding, np.int64)
        used = 0
        counts = np.zeros(len(ids), bool)  # as labels
        for start, length in self.rows.row(index):
            if not (
                0 < length <= len(ids) - used
                and 0 <= start <= len(self.stream) - length
            ):
                raise ConfigError(
                    f"data.packing=best_fit has damaged rows in {self.rows.folder} (row "
                    f"{index}); remove that folder, so that they are packed again"
                )
            ids[used : used + length] = self.stream.read(start, length)
            counts[used : used + length] = (
                True if self.learned is None else self.learned.read(start, length)
            )
            if self.learned is not None:
                counts[used] = False  # the preceding token belongs to another document
            used += length
        return ids[:-1], np.where(counts[1:], ids[1:], IGNORE_INDEX)


def pack_rows(
    cache: Path,
    folder: str,
    index: Index,
    split: str,
    seq_len: int,
    report: Callable[[str], object],
    learned: TokenStream | None = None,
) -> PackedRows:
    """The rows of a split (``train`` or ``eval``) of a folder, packed unless the folder ``cache``
    holds them.

    ``report`` receives a sentence on each wait, repair and result; ``learned`` is as for
    ``PackedSamples``. ConfigError if the cache cannot be written.
    """
    sums = [[shard.ends_sha256, shard.learned_sha256] for shard in index.of(split)]
    rows_folder = (
        cache / f"packing-{hash_of(ROWS_VERSION, GROUP, seq_len, sums)[:KEY_LENGTH]}"
    )
    try:
        rows = _open_rows(rows_folder)
        if rows is not None:
            return rows
        cache.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for process {{}}, which packs {folder}"
        with hold_lock(
            rows_folder.with_name(f"{rows_folder.name}.lock"),
            str(rows_folder),
            lambda pid: report(waiting.format(pid)),
        ):
            rows = _open_rows(rows_folder)
            if rows is not None:
                return rows
            if os.path.lexists(rows_folder):
                report(f"{rows_folder} is damaged; {folder} is packed again")
            left_out = _write_rows(rows_folder, folder, index, split, seq_len, learned)
            rows = PackedRows(rows_folder)
            if left_out:
                report(
                    f"left out {left_out:,} parts without an answer, of documents longer than "
                    f"{seq_len} tokens"
                )
            padded = 1 - rows.counts.ids / (len(rows) * (seq_len + 1))
            report(
                f"packed the {split} part of {folder} into {len(rows):,} rows, {padded:.2%} of "
                "them padding"
            )
            return rows
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.packing=best_fit cannot keep its rows in {rows_folder} ({error}); set "
            "data.cache to a folder that can be written, or remove this one"
        ) from error


def _open_rows(rows_folder: Path) -> PackedRows | None:
    """The rows in a folder; None if it is missing or damaged."""
    try:
        return PackedRows(rows_folder)
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError, ValueError):
        return None


def _write_rows(
    rows_folder: Path,
    folder: str,
    index: Index,
    split: str,
    seq_len: int,
    learned: TokenStream | None,
) -> int:
    """Write the rows, and return the number of pieces without a label, which are left out."""
    part = rows_folder.with_name(f"{rows_folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    counts = _Counts(0, 0, 0)
    left_out = 0
    with ExitStack() as stack:
        files: list[BinaryIO] = [
            stack.enter_context(open(part / name, "wb")) for name in FILES
        ]
        for starts, lengths, are_cut in _groups(folder, index, split, seq_len):
            if learned is not None:
                has_label = ~are_cut
                for piece in np.flatnonzero(are_cut):
                    # the first id of a piece is no label
                    start = int(starts[piece]) + 1
                    has_label[piece] = learned.read(
                        start, int(lengths[piece]) - 1
                    ).any()
                left_out += len(has_label) - int(has_label.sum())
                starts = starts[has_label]
                lengths = lengths[has_label]
            rows = best_fit(lengths, seq_len + 1)
            order = np.fromiter(
                itertools.chain.from_iterable(rows), np.int64, len(lengths)
            )
            stops = counts.pieces + np.cumsum([len(row) for row in rows])
            columns = (starts[order], lengths[order], stops)
            for file, dtype, values in zip(files, FILES.values(), columns, strict=True):
                file.write(values.astype(dtype).data)
            counts.rows += len(rows)
            counts.pieces += len(order)
            counts.ids += int(lengths.sum())
    shutil.rmtree(rows_folder, ignore_errors=True)
    seal_folder(part, rows_folder, COUNTS_FILE, json.dumps(dataclasses.asdict(counts)))
    map_file.cache_clear()  # of the rows that were here before
    return left_out


def _groups(
    folder: str, index: Index, split: str, seq_len: int
) -> Iterator[tuple[Tokens, Tokens, NDArray[Any]]]:
    """Starts in the stream and lengths of the documents' pieces, and which are cut, one group at a
    time."""
    pending = np.empty(0, np.int64)
    last = before = 0
    for shard in index.of(split):
        ends = read_ends(folder, shard)
        if not ends_fit(ends, shard):
            raise ConfigError(
                f"{os.path.join(folder, shard.name)}.ends does not fit the {shard.tokens} ids of "
                f"its shard; remove {folder} and prepare it again"
            )
        pending = np.concatenate([pending, before + ends])
        while len(pending) >= GROUP:
            yield cut(last, pending[:GROUP], seq_len)
            last = int(pending[GROUP - 1])
            pending = pending[GROUP:]
        before += shard.tokens
    if len(pending):
        yield cut(last, pending, seq_len)
