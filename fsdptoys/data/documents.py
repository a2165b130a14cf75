"""Documents: what every format of files reads (``document_reader.FORMATS``).

A format of records reads one record after another and leaves the choice of fields to ``Records``,
so that each works for texts and for conversations.
"""

import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line, short_text

from .source_files import SourceFile

Documents = Iterator[tuple[Any, float]]
"""Documents as a ``Records`` reads them, or ``LongText``, and the share of the file read so far."""


class Records:
    """Reads documents that are one text: a ``str``, None or empty for a record without text."""

    optional_fields: tuple[str, ...] = ()
    """Fields besides the one that the user names."""
    plain_files = True
    """Whether other files are one document of text each."""

    def read(self, owner: str, name: str, record: Mapping[str, Any], where: str) -> Any:
        """The document in field ``name``; ConfigError if it is of no use.

        ``owner`` and ``where`` are file and line for messages.
        """
        if name not in record:
            raise missing_field(owner, name, sorted(record), where)
        value = record[name]
        if value is None or isinstance(value, str):
            return value
        raise ConfigError(
            f"{owner} has {short_text(value)} as {name}{where}, which is no text; name a field "
            "of text"
        )


TEXTS = Records()


@dataclass(frozen=True)
class RecordFormat:
    """A format of files that hold records."""

    suffixes: tuple[str, ...]  # of the files' names, in lower case
    read: Callable[[str, SourceFile, str, Records], Documents]
    """Read the documents in a field; the first argument is the file for messages."""
    needs_datasets: bool = False  # the package


def open_content(source: SourceFile) -> tuple[IO[bytes], IO[bytes]]:
    """The decompressed content, and the file on disk. Its position is the progress."""
    raw = open_regular(source.path)  # closed with the content, or with the process
    if source.path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if source.path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")), raw
    return raw, raw


def missing_field(
    owner: str, field: str, fields: Sequence[str], where: str = ""
) -> ConfigError:
    """The error for a record, or a table, without the field."""
    has = one_line(", ".join(map(str, fields))[:200])
    return ConfigError(
        f"{owner} has no field {field!r}{where}: it has {has}; name the one that holds the text"
    )
