"""Documents out of files, one after the other, holding no more than one of them, or one group of rows, in memory.

The name says what a file holds: ``.jsonl``, ``.ndjson`` and ``.json`` an object a line, ``.parquet`` and ``.arrow``
tables, anything else one document of text in UTF-8. All but tables may be compressed (``.gz``, ``.zst``). A folder
that ``datasets.Dataset.save_to_disk`` has left is read too. The order is that of the files, then that within each.

Parquet and zstd are read by pyarrow, which comes with ``datasets``; Arrow files and folders by ``datasets`` itself,
which maps them. Nothing is downloaded. Not covered: one JSON array a file, nested fields, tables that are compressed
as a whole.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line

from .byte_text import STDLIB, stdlib_files
from .token_files import SourceFile, match_files, without_repeats

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
SAVED_MARKS = ("state.json", "dataset_info.json")
DICT_MARK = "dataset_dict.json"
ROWS = 1000
"""Rows of a table that are read at a time."""

LONG_BYTES = 8 * 2**20
"""From here on a text is held once, as bytes, if its reader can do with them."""
BLOCK_BYTES = 2**20


class LongText:
    """A long text in UTF-8 that is held once: as bytes, and neither decoded nor copied."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    def blocks(self) -> Iterator[bytes]:
        """The bytes, 1 MiB at a time, without zero bytes."""
        for start in range(0, len(self._content), BLOCK_BYTES):
            yield bytes(self._content[start : start + BLOCK_BYTES]).replace(b"\0", b"")

    def release(self) -> None:
        """Free the memory, whoever else still refers to the text."""
        self._content = bytearray()


Read = Iterator[tuple["str | LongText | None", float]]
"""Texts (None or empty where a record has none), each with the share of its file that was read by then."""


@dataclass(frozen=True)
class SourceData(SourceFile):
    """A file, or a folder of ``datasets``."""

    is_folder: bool = False

    @property
    def kind(self) -> str:
        """lines, parquet, arrow, folder or text."""
        if self.is_folder:
            return "folder"
        suffix = os.path.splitext(self.path.removesuffix(".gz").removesuffix(".zst"))[1].lower()
        if suffix in TABLES:
            return suffix[1:]
        return "lines" if suffix in LINES else "text"

    @property
    def needs_datasets(self) -> bool:
        """Whether the extra is needed to read it."""
        return self.kind in ("parquet", "arrow", "folder") or self.path.endswith(".zst")


def find_sources(key: str, patterns: Sequence[str]) -> list[SourceData]:
    """The files and folders that paths and globs name, each once.

    Raises:
        ConfigError: if one is not there or cannot be read, or its kind needs a package that is not installed.
    """
    files: list[SourceFile] = []
    for pattern in patterns:
        folder = Path(pattern).expanduser()
        if pattern == STDLIB and not os.path.exists(folder):
            files += stdlib_files()
        elif os.path.isfile(folder / DICT_MARK):
            splits = sorted(path.name for path in folder.iterdir() if (path / SAVED_MARKS[0]).is_file())
            raise ConfigError(
                f"{key}=[{pattern}] holds several parts ({', '.join(splits)}); "
                f"name one of them, {os.path.join(pattern, splits[0] if splits else 'train')}"
            )
        elif all(os.path.isfile(folder / mark) for mark in SAVED_MARKS):
            for path in folder.iterdir():
                if not path.is_file():  # datasets would wait for the writer of a pipe
                    raise ConfigError(f"{key}=[{pattern}] holds {path.name}, which is no regular file; take it out")
            size = sum(path.stat().st_size for path in folder.glob("*.arrow"))
            files.append(SourceData(str(folder), folder.name, size, is_folder=True))
        else:
            files += match_files(key, pattern)
    files = [file for file in files if file.size_bytes]  # a glob may match empty ones
    if not files:
        raise ConfigError(f"{key}=[{','.join(patterns)}] finds nothing to read; name files that hold text")
    sources = [
        file if isinstance(file, SourceData) else SourceData(file.path, file.name, file.size_bytes)
        for file in without_repeats(files)
    ]
    needing = next((source for source in sources if source.needs_datasets), None)
    if needing is not None:
        require_datasets(f"{key}=[{needing.path}]")
    return sources


def require_datasets(owner: str) -> None:
    """Refuse what only the extra can read, where it is not installed.

    Raises:
        ConfigError: if it is not.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{owner} needs the package datasets, which is not installed; pip install 'fsdptoys[data]'"
        ) from error


def read_documents(key: str, source: SourceData, field: str, *, long_texts: bool = False) -> Read:
    """A source's documents, in order.

    Args:
        key: the configuration's key, for messages.
        source: file or folder.
        field: of records, the one that holds the text.
        long_texts: whether the reader takes files of text from ``LONG_BYTES`` on as ``LongText``.

    Raises:
        ConfigError: if it cannot be read, has no such field, or a document does not fit into memory.
    """
    owner = f"{key}=[{source.path}]"
    readers = {"lines": _lines, "parquet": _parquet, "arrow": _arrow, "folder": _arrow}
    try:
        if source.kind == "text":
            yield from _text(owner, source, long_texts)
        else:
            yield from readers[source.kind](owner, source, field)
    except ConfigError:
        raise
    except MemoryError as error:
        raise no_memory(owner) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{owner} cannot be read ({error}); mend the file or leave it out") from error


def no_memory(owner: str) -> ConfigError:
    """The sentence for a document that does not fit into memory.

    Args:
        owner: files, as the user named them.
    """
    return ConfigError(
        f"{owner} holds a document that does not fit into this machine's memory; split it into several documents, or "
        "run fsdptoys data prepare where there is more memory and train with data=prepared"
    )


def _text(owner: str, source: SourceData, long_texts: bool) -> Read:
    content = bytearray()
    with _open(source)[0] as file:
        while block := file.read(BLOCK_BYTES):  # a gzip file that is read at once holds its content twice
            content += block
    start = 0
    try:
        if not long_texts or len(content) < LONG_BYTES:
            text = content.decode("utf-8")
            del content
            yield text, 1.0
            return
        while start < len(content):
            stop = _character_start(content, start + BLOCK_BYTES)
            str(content[start:stop], "utf-8")
            start = stop
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{owner} holds no text in UTF-8 (byte {start + error.start}); write it in UTF-8 or leave it out"
        ) from error
    long = LongText(content)
    del content
    yield long, 1.0


def _character_start(content: bytearray, place: int) -> int:
    """The last place up to the given one where a character may begin, if the content is UTF-8."""
    if place >= len(content):
        return len(content)
    return next((start for start in range(place, place - 4, -1) if content[start] & 0xC0 != 0x80), place)


def _lines(owner: str, source: SourceData, field: str) -> Read:
    opened, raw = _open(source)
    with opened as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                # Nothing but the one field is looked at, so that what the others hold, and how deep, does not matter;
                # parse_json checks them too, and takes eight times as long for it.
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{owner} has no JSON object in line {number} ({one_line(error)}); write one object a line"
                ) from error
            del line  # or a long document is held twice
            if not isinstance(record, dict) or field not in record:
                found = sorted(record) if isinstance(record, dict) else []
                raise _no_field(owner, field, found, f" in line {number}")
            yield _checked(owner, field, record[field], f" in line {number}"), raw.tell() / source.size_bytes


def _parquet(owner: str, source: SourceData, field: str) -> Read:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            if field not in file.schema_arrow.names:
                raise _no_field(owner, field, file.schema_arrow.names)
            rows, done = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    done += 1
                    yield _checked(owner, field, value, f" in row {done}"), done / rows
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{owner} cannot be read as Parquet ({error}); write it again or leave it out") from error


def _arrow(owner: str, source: SourceData, field: str) -> Read:
    import datasets

    try:
        load = datasets.load_from_disk if source.is_folder else datasets.Dataset.from_file
        table = cast(Any, load(source.path))
        if field not in table.column_names:
            raise _no_field(owner, field, table.column_names)
        done = 0
        for batch in table.select_columns([field]).with_format(None).iter(batch_size=ROWS):
            for value in batch[field]:
                done += 1
                yield _checked(owner, field, value, f" in row {done}"), done / len(table)
    except ConfigError:
        raise
    except Exception as error:  # pyarrow's, datasets' and the system's own
        raise ConfigError(f"{owner} cannot be read by datasets ({error}); save it again or leave it out") from error


def _open(source: SourceData) -> tuple[IO[bytes], IO[bytes]]:
    """The contents, and the file on disk below them, which tells how far it was read."""
    raw = open_regular(source.path)  # closed with the first of the two, or with the process
    if source.path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if source.path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")), raw
    return raw, raw


def _checked(owner: str, field: str, value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        shown = one_line(repr(value))[:40]
    except RecursionError:
        shown = f"a deep {type(value).__name__}"
    raise ConfigError(f"{owner} has {shown} as {field}{where}, which is no text; name a field of text")


def _no_field(owner: str, field: str, found: Sequence[str], where: str = "") -> ConfigError:
    has = f"it has {one_line(', '.join(map(str, found))[:200])}" if found else "there is no object"
    return ConfigError(f"{owner} has no field {field!r}{where}: {has}; name the one that holds the text")
