"""JSON lines: one object a line."""

import json

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line, short_text

from .documents import Documents, RecordFormat, Records, open_content
from .source_files import SourceFile


def read_lines(
    owner: str, source: SourceFile, field: str, records: Records
) -> Documents:
    """Documents of one file, in order."""
    content, raw = open_content(source)
    with content:
        for number, line in enumerate(content, 1):
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


JSON_LINES = RecordFormat((".jsonl", ".ndjson", ".json"), read_lines)
