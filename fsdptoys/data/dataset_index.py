"""The index of a folder of tokens, as ``fsdptoys data prepare`` writes it.

- ``index.json``: dtype, meaning and source of the ids, and size and checksums of every shard.
- ``shard-00000.bin``: ids of whole documents, little-endian, each with the end-of-document id
  behind it.
- ``shard-00000.ends``: the position behind each document's last id in that shard, little-endian, 64
  bits each.
- ``shard-00000.learned``: a byte for each id, 1 if it counts as a label, else 0; of conversations
  only (``data=chat``).
- ``tokenizer.json``: a copy of the tokenizer's file, if there is one, for users of the trained
  model.

A shard belongs to one split, ``train`` or ``eval``. The index is written last, so a folder with an
index is complete. Opening one reads the index and the sizes of the files; only ``check_folder``
reads the files themselves.
"""

import dataclasses
import json
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import between
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import NotRegularFileError, read_regular
from fsdptoys.utils.sealed_folder import sum_bytes, sum_path

from .dataset import hash_of
from .token_files import map_file
from .tokenizer_settings import TOKENIZER_FILE as TOKENIZER_FILE

INDEX_FILE = "index.json"
FORMAT = "fsdptoys tokens"
VERSION = 1
VERSION_WITH_LEARNED = 2  # programs that know version 1 only would train on every id
SPLITS = ("train", "eval")
# a name with a slash would reach other folders
SHARD_NAME = re.compile(r"shard-[0-9]{5,9}")
DTYPES: dict[str, "np.dtype[Any]"] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
ENDS_DTYPE = np.dtype("<i8")
LEARNED_DTYPE = np.dtype("u1")
MOST_IDS = 2**32
MOST_INDEX_BYTES = 2**28  # more than the index of a million shards
MOST_TOKENIZER_BYTES = 2**30
MOST_COUNT = 2**53  # of ids, documents or bytes


class UnusableFolderError(ConfigError):
    """A folder lacks files or is damaged, so that preparing it again helps; errors of the system
    are others."""


@dataclass(frozen=True)
class Shard:
    """Two or three files: ids, ends of documents, and perhaps which ids are learned."""

    name: str
    split: str
    tokens: int = field(metadata=between(1, MOST_COUNT))
    documents: int = field(metadata=between(1, MOST_COUNT))
    sha256: str  # of the ids, in hexadecimal
    ends_sha256: str
    learned_sha256: str | None = None


class ShardFile(NamedTuple):
    """A file of a shard."""

    name: str
    items: int
    dtype: "np.dtype[Any]"
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.items * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """A prepared file."""

    name: str
    bytes: int = field(metadata=between(0, MOST_COUNT))


@dataclass(frozen=True, kw_only=True)
class Index:
    """Contents of ``index.json``."""

    dtype: str
    vocab_size: int = field(metadata=between(1, MOST_IDS))  # ids are below it
    # the id after each document
    document_end: int = field(metadata=between(0, MOST_IDS - 1))
    tokenizer: str  # ``bytes``, or the name of the tokenizer's file
    tokenizer_sha256: str
    """Of the meaning of the ids, including the end of a document; folders that differ in it cannot
    be mixed."""
    tokenizer_file_sha256: str | None = None
    """Of the folder's copy of the tokenizer's file; None where it has none."""
    field: str  # field of a record with the text
    # Requested share of held-out documents
    eval_fraction: float = dataclasses.field(metadata=between(0, 1))
    # documents without text
    left_out: int = dataclasses.field(metadata=between(0, MOST_COUNT))
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]

    def files(self, shard: Shard) -> list[ShardFile]:
        """A shard's files: ids, ends of documents, and perhaps which ids are learned."""
        name = shard.name
        dtype = DTYPES[self.dtype]
        files = [
            ShardFile(f"{name}.bin", shard.tokens, dtype, shard.sha256),
            ShardFile(f"{name}.ends", shard.documents, ENDS_DTYPE, shard.ends_sha256),
        ]
        if shard.learned_sha256 is not None:
            sha256 = shard.learned_sha256
            files.append(
                ShardFile(f"{name}.learned", shard.tokens, LEARNED_DTYPE, sha256)
            )
        return files

    def of(self, split: str) -> list[Shard]:
        """A split's shards, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        """A split's ids."""
        return sum(shard.tokens for shard in self.of(split))

    def documents(self, split: str) -> int:
        """A split's documents."""
        return sum(shard.documents for shard in self.of(split))

    def fingerprint(self, split: str) -> str:
        """Hash of a split's contents, made of its shards' checksums."""
        contents = [
            [shard.tokens, *filter(None, [shard.sha256, shard.learned_sha256])]
            for shard in self.of(split)
        ]
        return hash_of(self.dtype, self.document_end, contents)

    @property
    def has_learned(self) -> bool:
        """Whether only some ids are learned."""
        return any(shard.learned_sha256 for shard in self.shards)

    def to_json(self) -> str:
        """The file's text, a function of the contents."""
        version = VERSION_WITH_LEARNED if self.has_learned else VERSION
        tree: dict[str, Any] = {
            "format": FORMAT,
            "version": version,
        } | dataclasses.asdict(self)
        for shard in () if self.has_learned else tree["shards"]:
            del shard["learned_sha256"]
        # escaped, since a file's name may not be UTF-8
        return json.dumps(tree, indent=1) + "\n"


def read_index(folder: str, owner: str) -> Index:
    """Read a folder's index and compare the sizes of its files with it; ``owner`` names the folder
    in messages.

    UnusableFolderError if it is no such folder, or damaged; ConfigError if the system refuses to
    read it.
    """
    root = Path(folder).expanduser()
    file = INDEX_FILE
    try:
        index = _from_tree(
            parse_json(read_regular(root / file, MOST_INDEX_BYTES), surrogates=True)
        )
        for file, size in files_of(index):
            facts = (root / file).stat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
                raise UnusableFolderError(
                    f"{owner} has {facts.st_size} bytes in {file}, where its index says {size}; "
                    "restore the file or prepare the folder again"
                )
        return index
    except UnusableFolderError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        if file == INDEX_FILE:
            what = "holds no" if root.is_dir() else "is no folder with an"
            raise UnusableFolderError(
                f"{owner} {what} {file}; make one with fsdptoys data prepare FILE ... --out "
                f"{folder} --tokenizer T"
            ) from None
        raise UnusableFolderError(
            f"{owner} lacks its file {file}; restore it or prepare the folder again"
        ) from None
    except (NotRegularFileError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UnusableFolderError(
            f"{owner} has an {file} that cannot be used ({reason}); prepare the folder again"
        ) from error
    except OSError as error:  # says nothing of the files' content
        raise ConfigError(
            f"{owner} cannot be read ({file}: {error.strerror}); change its permissions or name "
            "another"
        ) from error


def files_of(index: Index) -> list[tuple[str, int]]:
    """Names and sizes of a folder's files, without the index."""
    return [
        (file.name, file.size_bytes)
        for shard in index.shards
        for file in index.files(shard)
    ]


def read_ends(folder: str, shard: Shard) -> NDArray[np.int64]:
    """Position behind each document of a shard, mapped rather than read."""
    path = Path(folder).expanduser() / f"{shard.name}.ends"
    return map_file(str(path), ENDS_DTYPE, shard.documents)


def ends_fit(ends: NDArray[np.int64], shard: Shard) -> bool:
    """Whether the ends ascend up to the shard's last id."""
    steps = np.diff(ends, prepend=0)
    return bool(ends[-1] == shard.tokens and (steps > 0).all())


def check_folder(
    folder: str, advance: Callable[[int], None] = lambda count: None
) -> tuple[Index, list[str]]:
    """Read every byte of a folder, compare it with the index, and return this and a sentence for
    every damaged file.

    ``advance`` is called with the number of bytes of each read. ConfigError if the index or a file
    is missing.
    """
    index = read_index(folder, folder)
    root = Path(folder).expanduser()
    damage = _check_tokenizer(root, index)
    damages = [damage] if damage else []
    for shard in index.shards:
        damages += _check_shard(root, index, shard, advance)
    return index, damages


def _check_shard(
    root: Path, index: Index, shard: Shard, advance: Callable[[int], None]
) -> Iterator[str]:
    """Yield a sentence for every damaged file of a shard."""
    files = index.files(shard)
    ids_file, ends_file = files[:2]
    highest = 0

    def visit(block: bytes) -> None:
        nonlocal highest
        if file is ids_file:
            highest = max(highest, int(np.frombuffer(block, file.dtype).max()))
        advance(len(block))

    for file in files:
        try:
            digest = sum_path(root / file.name, visit).sha256
        except OSError as error:
            yield f"{file.name} cannot be read ({error.strerror or error})"
            continue
        if digest != file.sha256:
            yield f"{file.name} differs from its index: its SHA-256 is {digest[:12]}…"
    if highest >= index.vocab_size:
        yield (
            f"{ids_file.name} has id {highest}, and the index says that all are below "
            f"{index.vocab_size}"
        )
    with suppress(OSError):  # reported above
        if not ends_fit(read_ends(str(root), shard), shard):
            yield f"{ends_file.name} does not fit its {shard.tokens} ids"


def kept_tokenizer(folder: str, index: Index) -> Path | None:
    """The folder's copy of its tokenizer's file, if it has one; ConfigError if it is missing or
    damaged."""
    root = Path(folder).expanduser()
    damage = _check_tokenizer(root, index)
    if damage:
        raise ConfigError(f"{damage}; restore it")
    return root / TOKENIZER_FILE if index.tokenizer_file_sha256 else None


def _check_tokenizer(root: Path, index: Index) -> str | None:
    """The damage of the tokenizer's copy, if any."""
    if index.tokenizer_file_sha256 is None:
        return None
    path = root / TOKENIZER_FILE
    try:
        digest = sum_bytes(read_regular(path, MOST_TOKENIZER_BYTES)).sha256
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', error)})"
    if digest != index.tokenizer_file_sha256:
        return f"{path} differs from its index: its SHA-256 is {digest[:12]}…"
    return None


def _from_tree(tree: Any) -> Index:
    """Build the index from a file's content; ValueError with the mistake."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ForeignError(f"it is not of the format {FORMAT!r}")
    if tree.get("version") not in (VERSION, VERSION_WITH_LEARNED):
        versions = f"versions {VERSION} and {VERSION_WITH_LEARNED}"
        raise ForeignError(
            f"it is of version {tree.get('version')}, and this program reads {versions}"
        )
    index = build(Index, tree, skip_unknown=True)
    names = {shard.name for shard in index.shards}
    if (
        index.dtype not in DTYPES
        or index.document_end >= index.vocab_size
        or index.eval_fraction == 1
        or len(names) < len(index.shards)
    ):
        raise ForeignError("its entries do not fit each other")
    for shard in index.shards:
        if (
            not SHARD_NAME.fullmatch(shard.name)
            or shard.split not in SPLITS
            or shard.documents > shard.tokens
            or (shard.learned_sha256 is None) == index.has_learned
        ):
            raise ForeignError(f"it describes shard {shard.name!r:.40} wrongly")
    return index
