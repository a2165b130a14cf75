"""Rows of whole documents: which documents share a row, so that none is cut and little is padded.

A row has room for ``seq_len + 1`` ids, the last of which is a label alone. Documents go into rows by best fit, the
longest first: each into the fullest row that still has room for it, or into a new one ("Fewer truncations improve
language modeling", arXiv:2404.10830). A document that is longer than a row is cut into rows of its own, each of which
begins with the id that the one before ended with, so that every id is predicted once; its rest is packed as a
document.

The fit is found in groups of ``GROUP`` documents, in their order, so that memory does not grow with their number, and
is kept as a plan of three files in the cache: made once for a folder, a split and a length, by the launcher or by the
first rank that needs it, and mapped by the others. It is 12 bytes a document and 8 a row.

What is padded has the end-of-document id and labels that do not count. The label of the id that ends a document is the
first id of the next one in its row, as in a stream of windows.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import alone
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import NotRegularFileError, read_regular
from fsdptoys.utils.text import one_line

from .dataset import IGNORE_INDEX, Tokens, hash_of
from .dataset_index import Index, checked_count, ends_file, read_ends, sync_folder
from .token_files import FileStream

GROUP = 2**16
"""Documents that are fitted together."""
PLAN_VERSION = 1
PLAN_FILE = "plan.json"
MOST_PLAN_BYTES = 2**12
STARTS, LENGTHS, ROWS = (np.dtype(kind) for kind in ("<i8", "<i4", "<i8"))
KEY_LENGTH = 24
SHORTEST = 2
"""Ids of a document with its end, at least; less room than that is none."""


class Packing(Enum):
    """How documents become samples."""

    none = "none"
    """Windows of the stream, which cross from one document into the next."""
    best_fit = "best_fit"
    """Rows of whole documents; what is left of a row is padded."""


def best_fit(lengths: NDArray[Any], capacity: int) -> list[list[int]]:
    """Numbers of the pieces in each row, the pieces in order.

    Args:
        lengths: of the pieces, at least ``SHORTEST`` and at most ``capacity``.
        capacity: of a row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: some row has room for just r more
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
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - size
        if left >= SHORTEST:
            with_room[left].append(row)
            rooms |= 1 << left
    return [sorted(row) for row in rows]


def cut(starts: Tokens, lengths: Tokens, seq_len: int) -> tuple[Tokens, Tokens]:
    """Pieces of documents that each fit a row: starts and lengths of documents in, those of pieces out."""
    counts = np.maximum(1, -(-(lengths - 1) // seq_len))
    owners = np.repeat(np.arange(len(lengths)), counts)
    before = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[owners] + before * seq_len, np.minimum(seq_len + 1, lengths[owners] - before * seq_len)


class Plan:
    """Which ids make which row, mapped.

    Args:
        folder: that ``make_plan`` has made.
    """

    _maps: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        notes = parse_json(read_regular(folder / PLAN_FILE, MOST_PLAN_BYTES))
        counts = [notes.get(name) if isinstance(notes, dict) else None for name in ("rows", "pieces", "ids")]
        self.rows, self.pieces, self.ids = (checked_count(count) for count in counts)
        """Of ids: in all rows, without padding; the ids between two parts of a document count twice."""
        for name, (kind, count) in self._files().items():
            if (folder / name).stat().st_size != count * kind.itemsize:
                raise ValueError(f"{name} has not the size that {PLAN_FILE} says")

    def _files(self) -> "dict[str, tuple[np.dtype[Any], int]]":
        """Number format and length of each file."""
        return {"starts": (STARTS, self.pieces), "lengths": (LENGTHS, self.pieces), "rows": (ROWS, self.rows)}

    def row(self, number: int) -> list[tuple[int, int]]:
        """Position in the stream and length of each piece of a row."""
        if self._maps is None:
            starts, lengths, rows = (
                np.memmap(self.folder / name, kind, "r", shape=(count,)).view(np.ndarray)
                for name, (kind, count) in self._files().items()
            )
            self._maps = starts, lengths, rows
        starts, lengths, rows = self._maps
        first, last = int(rows[number - 1]) if number else 0, int(rows[number])
        return list(zip(starts[first:last].tolist(), lengths[first:last].tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}


class PackedSamples:
    """Rows of whole documents.

    Args:
        stream: all documents of a split.
        plan: of its rows.
        seq_len: tokens a sample.
        padding: id of what is left of a row.
    """

    endless = False

    def __init__(self, stream: FileStream, plan: Plan, seq_len: int, padding: int) -> None:
        self.stream = stream
        self.plan = plan
        self.seq_len = seq_len
        self.padding = padding

    def __len__(self) -> int:
        return self.plan.rows

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids, used = np.full(self.seq_len + 1, self.padding, np.int64), 0
        for start, length in self.plan.row(index):
            if not (0 < length <= len(ids) - used and 0 <= start <= len(self.stream) - length):
                raise ConfigError(
                    f"data.packing=best_fit has a damaged plan in {self.plan.folder} (row {index}); remove that "
                    "folder, so that it is made again"
                )
            ids[used : used + length] = self.stream.read(start, length)
            used += length
        labels_T = ids[1:].copy()
        labels_T[used - 1 :] = IGNORE_INDEX
        return ids[:-1], labels_T


def make_plan(
    cache: Path, folder: str, index: Index, split: str, seq_len: int, tell: Callable[[str], None] = lambda text: None
) -> Plan:
    """The plan of a split's rows, made if it is not there.

    Args:
        cache: where plans are kept.
        folder: of the data.
        index: of it.
        split: which.
        seq_len: tokens a sample.
        tell: told what takes time.

    Raises:
        ConfigError: if it cannot be written.
    """
    ends = [shard.ends_sha256 for shard in index.of(split)]
    place = cache / f"packing-{hash_of(PLAN_VERSION, GROUP, seq_len, ends)[:KEY_LENGTH]}"
    try:
        plan, _ = _open_plan(place)
        if plan is None:
            cache.mkdir(parents=True, exist_ok=True)
            waiting = f"waiting for process {{}}, which packs {folder}"
            with alone(place.with_name(f"{place.name}.lock"), str(place), lambda pid: tell(waiting.format(pid))):
                plan, damage = _open_plan(place)
                if plan is None:
                    if damage:
                        tell(f"{place} is damaged ({damage}); {folder} is packed again")
                    _write_plan(place, folder, index, split, seq_len)
                    plan = Plan(place)
                    padded = 1 - plan.ids / (plan.rows * (seq_len + 1))
                    tell(f"packed the {split} part of {folder} into {plan.rows:,} rows, {padded:.2%} of them padding")
        return plan
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.packing=best_fit cannot keep its plan in {place} ({error}); set data.cache to a folder that can be "
            "written, or remove this one"
        ) from error


def _open_plan(place: Path) -> tuple[Plan | None, str | None]:
    """The plan in a folder, if it can be used; else why not, if there is anything.

    Raises:
        OSError: if the system refuses to read it.
    """
    try:
        return Plan(place), None
    except (FileNotFoundError, NotADirectoryError):
        return None, "files are missing" if os.path.lexists(place) else None
    except NotRegularFileError as error:
        return None, error.strerror
    except ValueError as error:
        return None, one_line(error)


def _write_plan(place: Path, folder: str, index: Index, split: str, seq_len: int) -> None:
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    pieces = rows_before = ids = 0
    files = [open(part / name, "wb") for name in ("starts", "lengths", "rows")]  # noqa: SIM115
    try:
        for starts, lengths in _groups(folder, index, split, seq_len):
            rows = best_fit(lengths, seq_len + 1)
            order = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(lengths))
            stops = pieces + np.cumsum([len(row) for row in rows])
            for file, values in zip(files, (starts[order], lengths[order], stops), strict=True):
                _append(file, values)
            pieces, rows_before, ids = pieces + len(order), rows_before + len(rows), ids + int(lengths.sum())
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files:
            file.close()
    (part / PLAN_FILE).write_text(json.dumps({"rows": rows_before, "pieces": pieces, "ids": ids}))
    sync_folder(part)
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)


def _append(file: BinaryIO, values: NDArray[Any]) -> None:
    kind = {"starts": STARTS, "lengths": LENGTHS, "rows": ROWS}[Path(file.name).name]
    file.write(values.astype(kind).data)


def _groups(folder: str, index: Index, split: str, seq_len: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Pieces of the documents, a group at a time: where each begins in the stream, and its length."""
    waiting, last, before = np.empty(0, np.int64), 0, 0
    for shard in index.of(split):
        try:
            ends = read_ends(folder, shard)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be read ({error.strerror or error}); see to it that its files can be"
            ) from error
        for first in range(0, len(ends), GROUP):
            group = ends[max(0, first - 1) : first + GROUP]
            if not (ends[0] > 0 and ends[-1] == shard.tokens and (np.diff(group) > 0).all()):
                raise ConfigError(
                    f"{os.path.join(folder, ends_file(shard.name))} does not fit the {shard.tokens} ids of its shard; "
                    f"remove {folder} and prepare it again"
                )
            waiting = np.concatenate([waiting, before + ends[first : first + GROUP]])
            if len(waiting) >= GROUP:
                stops, waiting = waiting[:GROUP], waiting[GROUP:]
                yield _pieces(last, stops, seq_len)
                last = int(stops[-1])
        before += shard.tokens
    if len(waiting):
        yield _pieces(last, waiting, seq_len)


def _pieces(start: int, stops: Tokens, seq_len: int) -> tuple[Tokens, Tokens]:
    starts = np.concatenate([[start], stops[:-1]])
    return cut(starts, stops - starts, seq_len)
