"""Read documents from files, with one document or one group of rows in memory at a time.

The file's name decides: ``.jsonl``, ``.ndjson`` and ``.json`` hold one object a line, ``.parquet``
and ``.arrow`` tables, other files one document of text in UTF-8; all except tables may be
compressed (``.gz``, ``.zst``). Folders of ``datasets.Dataset.save_to_disk`` are read too. Nothing
is downloaded.

Not covered: one JSON array a file, nested fields, compressed tables.
"""

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line, short_text

from .byte_text import STDLIB, stdlib_files
from .token_files import SourceFile, match_files, without_repeats

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
SAVED_MARK = "dataset_info.json"
DICT_MARK = "dataset_dict.json"
ROWS = 1000  # rows of a table read at a time
LONG_BYTES = (
    8 * 2**20
)  # a longer text is held once, as bytes, if the encoder takes bytes
BLOCK_BYTES = 2**20


class LongText:
    """A long text as bytes of UTF-8, neither decoded nor copied."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    def blocks(self) -> Iterator[bytes]:
        """The bytes without zeros, 1 MiB at a time."""
        for start in range(0, len(self._content), BLOCK_BYTES):
            yield bytes(self._content[start : start + BLOCK_BYTES]).replace(b"\0", b"")

    def release(self) -> None:
        """Free the memory, even while others refer to the text."""
        self._content = bytearray()


Read = Iterator[tuple[Any, float]]
"""Documents as a ``Records`` reads them, or ``LongText``, each with the share of its file read so
far."""


class Records:
    """Reads documents that are one text: a ``str``, None or empty for a record without text."""

    optional_fields: tuple[str, ...] = ()
    """Fields besides the one that the user names."""
    plain_files = True
    """Whether other files are one document of text each."""

    def read(self, owner: str, name: str, record: Mapping[str, Any], where: str) -> Any:
        """The document in field ``name``, of which ``owner`` and ``where`` are file and line for
        messages; ConfigError if it is of no use."""
        if name not in record:
            raise _no_field(owner, name, sorted(record), where)
        value = record[name]
        if value is None or isinstance(value, str):
            return value
        raise ConfigError(
            f"{owner} has {short_text(value)} as {name}{where}, which is no text; name a field "
            "of text"
        )


TEXTS = Records()


def kind_of(source: SourceFile) -> str:
    """``lines``, ``parquet``, ``arrow``, ``folder`` or ``text``."""
    if source.is_folder:
        return "folder"
    suffix = os.path.splitext(source.path.removesuffix(".gz").removesuffix(".zst"))[
        1
    ].lower()
    if suffix in TABLES:
        return suffix[1:]
    return "lines" if suffix in LINES else "text"


def find_sources(key: str, patterns: Sequence[str]) -> list[SourceFile]:
    """The files and folders of paths and globs, each once; ConfigError if one is missing or needs a
    missing package."""
    files: list[SourceFile] = []
    for pattern in patterns:
        folder = Path(pattern).expanduser()
        if pattern == STDLIB and not folder.exists():
            files += stdlib_files()
        elif (folder / DICT_MARK).is_file():
            raise ConfigError(
                f"{key}=[{pattern}] holds several data sets; name one of its folders, such as "
                f"{os.path.join(pattern, 'train')}"
            )
        elif (folder / SAVED_MARK).is_file():
            size = 0
            for path in folder.iterdir():
                if not path.is_file():  # datasets would block on a pipe
                    raise ConfigError(
                        f"{key}=[{pattern}] holds {path.name}, which is no regular file; take it "
                        "out"
                    )
                if path.suffix == ".arrow":
                    size += path.stat().st_size
            files.append(SourceFile(str(folder), folder.name, size, is_folder=True))
        else:
            files += match_files(key, pattern)
    files = [file for file in files if file.size_bytes]  # globs may match empty files
    if not files:
        raise ConfigError(
            f"{key}=[{','.join(patterns)}] finds nothing to read; name files that hold text"
        )
    sources = without_repeats(files)
    for file in sources:
        is_plain = kind_of(file) in ("lines", "text") and not file.path.endswith(".zst")
        if not is_plain and find_spec("datasets") is None:
            raise ConfigError(
                f"{key}=[{file.path}] needs the package datasets, which is not installed; pip "
                "install -e '.[data]'"
            )
    return sources


def read_documents(
    key: str,
    source: SourceFile,
    field: str,
    *,
    long_texts: bool = False,
    records: Records = TEXTS,
) -> Read:
    """A source's documents, in order, read by ``records`` from ``field`` of each record.

    ``long_texts`` yields files of text from ``LONG_BYTES`` on as ``LongText``. ConfigError if the
    source cannot be read or has no such field, or a document does not fit into memory.
    """
    owner = f"{key}=[{source.path}]"
    readers = {"lines": _lines, "parquet": _parquet, "arrow": _arrow, "folder": _arrow}
    try:
        reader = readers.get(kind_of(source))
        if reader is not None:
            yield from reader(owner, source, field, records)
        elif records.plain_files:
            yield from _text(owner, source, long_texts)
        else:
            raise ConfigError(
                f"{owner} is neither JSON lines nor a table; name files that end in "
                f"{', '.join((*LINES, *TABLES))}"
            )
    except ConfigError:
        raise
    except MemoryError as error:
        raise no_memory(owner) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{owner} cannot be read ({error}); repair the file or leave it out"
        ) from error


def no_memory(owner: str) -> ConfigError:
    """The error for a document that does not fit into memory; ``owner`` is the files as the user
    named them."""
    return ConfigError(
        f"{owner} holds a document that does not fit into this machine's memory; split it into "
        "several documents, or run fsdptoys data prepare where there is more memory and train "
        "with data=prepared"
    )


def _text(owner: str, source: SourceFile, long_texts: bool) -> Read:
    content = bytearray()
    with _open(source)[0] as file:
        # Reading a gzip file at once holds its content twice
        while block := file.read(BLOCK_BYTES):
            content += block
    try:
        if long_texts and len(content) >= LONG_BYTES:
            long = LongText(content)
            del content
            for _ in codecs.iterdecode(long.blocks(), "utf-8"):
                pass
            yield long, 1.0
        else:
            text = content.decode("utf-8")
            del content
            yield text, 1.0
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{owner} holds no text in UTF-8; write it in UTF-8 or leave it out"
        ) from error


def _lines(owner: str, source: SourceFile, field: str, records: Records) -> Read:
    opened, raw = _open(source)
    with opened as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                # Few fields are used, so the others need no bounds; parse_json checks them in eight
                # times the time.
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{owner} has no JSON object in line {number} ({one_line(error)}); write one "
                    "object a line"
                ) from error
            del line  # or a long document would be held twice
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{owner} has {short_text(record)} in line {number}, which is no object; write "
                    "one object a line"
                )
            yield (
                records.read(owner, field, record, f" in line {number}"),
                raw.tell() / source.size_bytes,
            )


def _parquet(owner: str, source: SourceFile, field: str, records: Records) -> Read:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            names = _columns(owner, field, file.schema_arrow.names, records)
            batches = file.iter_batches(batch_size=ROWS, columns=names)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _rows(owner, field, rows, file.metadata.num_rows, records)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{owner} cannot be read as Parquet ({error}); write it again or leave it out"
        ) from error


def _arrow(owner: str, source: SourceFile, field: str, records: Records) -> Read:
    import datasets

    try:
        load = (
            datasets.load_from_disk if source.is_folder else datasets.Dataset.from_file
        )
        table = cast(Any, load(source.path))
        names = _columns(owner, field, table.column_names, records)
        batches = table.select_columns(names).with_format(None).iter(batch_size=ROWS)
        columns = ([batch[name] for name in names] for batch in batches)
        rows = (
            dict(zip(names, values, strict=True))
            for batch in columns
            for values in zip(*batch, strict=True)
        )
        yield from _rows(owner, field, rows, len(table), records)
    except ConfigError:
        raise
    except Exception as error:  # pyarrow's, datasets' and the system's own
        raise ConfigError(
            f"{owner} cannot be read by datasets ({error}); save it again or leave it out"
        ) from error


def _columns(
    owner: str, field: str, columns: Sequence[str], records: Records
) -> list[str]:
    """The columns to read."""
    if field not in columns:
        raise _no_field(owner, field, columns)
    return [field, *(name for name in records.optional_fields if name in columns)]


def _rows(
    owner: str, field: str, rows: Iterable[dict[str, Any]], count: int, records: Records
) -> Read:
    for number, row in enumerate(rows, 1):
        yield records.read(owner, field, row, f" in row {number}"), number / count


def _open(source: SourceFile) -> tuple[IO[bytes], IO[bytes]]:
    """The content, and the file on disk, whose position is the progress."""
    raw = open_regular(source.path)  # closed with the content, or with the process
    if source.path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if source.path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")), raw
    return raw, raw


def _no_field(
    owner: str, field: str, found: Sequence[str], where: str = ""
) -> ConfigError:
    has = one_line(", ".join(map(str, found))[:200])
    return ConfigError(
        f"{owner} has no field {field!r}{where}: it has {has}; name the one that holds the text"
    )
