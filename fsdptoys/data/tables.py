"""Tables: Parquet and Arrow files, and folders of ``datasets.Dataset.save_to_disk``."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from fsdptoys.errors import ConfigError

from .documents import Documents, RecordFormat, Records, missing_field
from .source_files import SourceFile

SAVED_MARK = "dataset_info.json"
DICT_MARK = "dataset_dict.json"
ROWS = 1000  # rows of a table read at a time


def saved_folder(key: str, pattern: str) -> SourceFile | None:
    """The folder of datasets at a path, if it is one."""
    folder = Path(pattern).expanduser()
    if (folder / DICT_MARK).is_file():
        raise ConfigError(
            f"{key}=[{pattern}] holds several data sets; name one of its folders, such as "
            f"{os.path.join(pattern, 'train')}"
        )
    if not (folder / SAVED_MARK).is_file():
        return None
    size = 0
    for path in folder.iterdir():
        if not path.is_file():  # datasets would block on a pipe
            raise ConfigError(
                f"{key}=[{pattern}] holds {path.name}, which is no regular file; take it out"
            )
        if path.suffix == ".arrow":
            size += path.stat().st_size
    return SourceFile(str(folder), folder.name, size, is_folder=True)


def read_parquet(
    owner: str, source: SourceFile, field: str, records: Records
) -> Documents:
    """Documents of a Parquet file, one group of rows in memory at a time."""
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


def read_arrow(
    owner: str, source: SourceFile, field: str, records: Records
) -> Documents:
    """Documents of an Arrow file, or of a folder of datasets."""
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
        raise missing_field(owner, field, columns)
    return [field, *(name for name in records.optional_fields if name in columns)]


def _rows(
    owner: str, field: str, rows: Iterable[dict[str, Any]], count: int, records: Records
) -> Documents:
    for number, row in enumerate(rows, 1):
        yield records.read(owner, field, row, f" in row {number}"), number / count


PARQUET = RecordFormat((".parquet",), read_parquet, needs_datasets=True)
ARROW = RecordFormat((".arrow",), read_arrow, needs_datasets=True)
