"""Formats that are added: of records, and of tokens."""

import csv
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdptoys.data import document_reader, prepare_folder
from fsdptoys.data.documents import RecordFormat, Records
from fsdptoys.data.source_files import SourceFile, match_files
from fsdptoys.data.token_files import TokenFile
from fsdptoys.data.token_stream import TokenStream
from fsdptoys.data.token_windows import split_windows, window_dataset
from tests.harness.prepared_data import read_split, request


def read_csv(
    owner: str, source: SourceFile, field: str, records: Records
) -> Iterator[tuple[Any, float]]:
    with open(source.path, newline="") as file:
        for row in csv.DictReader(file):
            yield records.read(owner, field, row, ""), 1.0


def test_format_of_records_is_one_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: texts written by csv itself."""
    formats = (*document_reader.FORMATS, RecordFormat((".csv",), read_csv))
    monkeypatch.setattr(document_reader, "FORMATS", formats)
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), (1, "one, two"), (2, "three\n")])
    prepare_folder(request(tmp_path / "out", tmp_path / "a.csv"))
    assert read_split(tmp_path / "out", "train") == [b"one, two", b"three\n"]


class CompressedFile(TokenFile):
    """Ids of 16 bits in a zlib stream."""

    def _ids(self) -> np.ndarray:
        return np.frombuffer(
            zlib.decompress(Path(self.source.path).read_bytes()), "<u2"
        )

    def __len__(self) -> int:
        return len(self._ids())

    def read(self, offset: int, count: int) -> np.ndarray:
        """See ``TokenFile``."""
        return self._ids()[offset : offset + count]


def test_format_of_tokens_is_one_class(tmp_path: Path) -> None:
    """Oracle: the ids; the files have another number of bytes than twice that of their tokens."""
    ids = np.arange(100, dtype="<u2") % 50
    for number, part in enumerate(np.split(ids, [37])):
        (tmp_path / f"{number}.z").write_bytes(zlib.compress(part.tobytes()))
    files = [
        CompressedFile("data.files", file, np.dtype("<u2"))
        for file in match_files("data.files", f"{tmp_path}/*.z")
    ]
    train, held_out = split_windows(TokenStream(files, 50), 8, 0.2)
    dataset = window_dataset("compressed", train, held_out, 0)
    tokens = np.concatenate([dataset.train[index][0] for index in range(len(train))])
    np.testing.assert_array_equal(tokens, ids[: len(tokens)])
    assert len(tokens) == 72 and len(dataset.eval) == 2
    assert dataset.unigram_entropy_nats == pytest.approx(np.log(50), rel=0.02)
