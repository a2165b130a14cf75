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

from .files import SourceFile, match_files, without_repeats
from .text import STDLIB, stdlib_files

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
SAVED_MARKS = ("state.json", "dataset_info.json")
DICT_MARK = "dataset_dict.json"
ROWS = 1000
"""Rows of a table that are read at a time."""

Read = Iterator[tuple[str | None, float]]
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


def read_documents(key: str, source: SourceData, field: str) -> Read:
    """A source's documents, in order.

    Args:
        key: the configuration's key, for messages.
        source: file or folder.
        field: of records, the one that holds the text.

    Raises:
        ConfigError: if it cannot be read, or has no such field.
    """
    owner = f"{key}=[{source.path}]"
    readers = {"lines": _lines, "parquet": _parquet, "arrow": _arrow, "folder": _arrow, "text": _text}
    try:
        yield from readers[source.kind](owner, source, field)
    except ConfigError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{owner} cannot be read ({error}); mend the file or leave it out") from error


def _text(owner: str, source: SourceData, field: str) -> Read:
    with _open(source)[0] as file:
        content = file.read()
    try:
        yield content.decode("utf-8"), 1.0
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{owner} holds no text in UTF-8 (byte {error.start}); write it in UTF-8 or leave it out"
        ) from error


def _lines(owner: str, source: SourceData, field: str) -> Read:
    opened, raw = _open(source)
    with opened as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{owner} has no JSON object in line {number} ({error}); write one object a line"
                ) from error
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
    raw = open(source.path, "rb")  # noqa: SIM115  # closed with the first of the two, or with the process
    if source.path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if source.path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")), raw
    return raw, raw


def _checked(owner: str, field: str, value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{owner} has {value!r:.40} as {field}{where}, which is no text; name a field of text")


def _no_field(owner: str, field: str, found: Sequence[str], where: str = "") -> ConfigError:
    has = f"it has {', '.join(map(str, found))[:200]}" if found else "there is no object"
    return ConfigError(f"{owner} has no field {field!r}{where}: {has}; name the one that holds the text")
