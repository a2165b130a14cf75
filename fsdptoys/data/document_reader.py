"""Read documents from files, with one document or one group of rows in memory at a time.

The file's name decides: ``.jsonl``, ``.ndjson`` and ``.json`` hold one object a line, ``.parquet``
and ``.arrow`` tables, other files one document of text in UTF-8; all except tables may be
compressed (``.gz``, ``.zst``). Folders of ``datasets.Dataset.save_to_disk`` are read too. Nothing
is downloaded.

Not covered: one JSON array a file, nested fields, compressed tables.
"""

import codecs
import os
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from fsdptoys.errors import ConfigError

from .documents import TEXTS, Documents, RecordFormat, Records, open_content
from .json_lines import JSON_LINES
from .source_files import (
    STDLIB,
    SourceFile,
    match_files,
    stdlib_files,
    without_repeats,
)
from .tables import ARROW, PARQUET, saved_folder

FORMATS = (JSON_LINES, PARQUET, ARROW)
"""Registry of the formats of records; files with other names are text."""
LONG_BYTES = 8 * 2**20
"""A longer text is held once, as bytes, if the encoder takes bytes."""
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


def format_of(source: SourceFile) -> RecordFormat | None:
    """The format of a file, by its name; None for text."""
    if source.is_folder:
        return ARROW
    path = source.path.removesuffix(".gz").removesuffix(".zst")
    suffix = os.path.splitext(path)[1].lower()
    return next((format for format in FORMATS if suffix in format.suffixes), None)


def find_sources(key: str, patterns: Sequence[str]) -> list[SourceFile]:
    """The files and folders of paths and globs, each once; ConfigError if one is missing or needs a
    missing package."""
    files: list[SourceFile] = []
    for pattern in patterns:
        folder = saved_folder(key, pattern)
        if folder is not None:
            files.append(folder)
        elif pattern == STDLIB and not os.path.exists(STDLIB):
            files += stdlib_files()
        else:
            files += match_files(key, pattern)
    files = [file for file in files if file.size_bytes]  # globs may match empty files
    if not files:
        raise ConfigError(
            f"{key}=[{','.join(patterns)}] finds nothing to read; name files that hold text"
        )
    sources = without_repeats(files)
    for file in sources:
        format = format_of(file)
        needs_datasets = format is not None and format.needs_datasets
        if (needs_datasets or file.path.endswith(".zst")) and not find_spec("datasets"):
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
) -> Documents:
    """A source's documents, in order, read by ``records`` from ``field`` of each record.

    ``long_texts`` yields files of text from ``LONG_BYTES`` on as ``LongText``. ConfigError if the
    source cannot be read or has no such field, or a document does not fit into memory.
    """
    owner = f"{key}=[{source.path}]"
    format = format_of(source)
    try:
        if format is not None:
            yield from format.read(owner, source, field, records)
        elif records.plain_files:
            yield from _text(owner, source, long_texts)
        else:
            raise ConfigError(
                f"{owner} is neither JSON lines nor a table; name files that end in "
                f"{', '.join(suffix for format in FORMATS for suffix in format.suffixes)}"
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


def _text(owner: str, source: SourceFile, long_texts: bool) -> Documents:
    content = bytearray()
    with open_content(source)[0] as file:
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
