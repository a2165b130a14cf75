"""Damaged and hostile tokenizer files are reported in one sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.data import open_encoder, prepare_folder
from fsdptoys.data.text_encoder import Encoder
from fsdptoys.data.tokenizer import open_tokenizer
from fsdptoys.errors import ConfigError
from tests.harness.prepared_data import request

pytest.importorskip("tokenizers")

BASE: dict[str, Any] = {
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"},
}
RETRIES = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+(?<!b)$"},
    "behavior": "Isolated",
    "invert": False,
}
"""Takes exponential time on "aaa…c", which the package's engine ends with a panic."""


def write(folder: Path, **changes: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(BASE | changes))
    return str(folder)


def open_it(folder: str) -> Encoder:
    return open_encoder(folder, None, f"data.tokenizer={folder}", "data.document_end")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as a tokenizer ("),
        (b"\xff\xfe noise \x1b[31m", "cannot be read as a tokenizer ("),
        (b"[" * 200_000, "cannot be read as a tokenizer ("),
        (
            json.dumps(
                BASE | {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}
            ).encode(),
            "empty vocab",
        ),
    ],
)
def test_invalid_tokenizer_file_is_reported_in_one_sentence(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    """Oracle: one printable sentence with the path."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_it(str(tmp_path))
    assert (
        reason in str(caught.value)
        and str(tmp_path) in str(caught.value)
        and str(caught.value).isprintable()
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("changes", "text"),
    [({}, "a word that is not there"), ({"pre_tokenizer": RETRIES}, "a" * 40 + "c")],
)
def test_failed_encoding_is_reported_in_one_sentence(
    changes: dict[str, Any], text: str, processes: int, tmp_path: Path
) -> None:
    """Oracle: the message, for a missing unknown token and for a panic of the regex engine, which
    is no Exception."""
    folder = write(tmp_path, **changes)
    (tmp_path / "a.txt").write_text(text)
    hostile_request = request(tmp_path / "out", tmp_path / "a.txt", processes=processes)
    hostile_request = dataclasses.replace(hostile_request, encoder=open_it(folder))
    with pytest.raises(
        ConfigError,
        match=rf"^data\.tokenizer={folder} cannot turn a document into ids \(.*\); name",
    ):
        prepare_folder(hostile_request)
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json cannot turn the text into ids \(.*\); name"
    ):
        open_tokenizer(folder, 256).encode(text)


def test_out_of_range_ids_are_reported(tmp_path: Path) -> None:
    """Oracle: the expected message, where the package raises OverflowError."""
    with pytest.raises(
        ConfigError, match=r"cannot turn ids into text \(number too large"
    ):
        open_tokenizer(write(tmp_path), 256).decode([2**40])


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b"{", b"\xff", b'{"eos_token": "\\ud800"}']
)
def test_unreadable_tokenizer_settings_are_named(
    content: bytes, tmp_path: Path
) -> None:
    """Oracle: the message with the path; an end token given by the user replaces the file."""
    folder = write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(
        ConfigError,
        match=rf"^{folder}/tokenizer_config\.json cannot be read .*; download it",
    ):
        open_it(folder)
    assert open_encoder(folder, "</s>", "", "").document_end == 1


@pytest.mark.parametrize(
    "content", [b"[]", b'{"eos_token": 7}', b'{"eos_token": {"content": []}}', b"{}"]
)
def test_settings_without_an_end_token_default_to_the_usual_one(
    content: bytes, tmp_path: Path
) -> None:
    """Oracle: ``</s>``, which the vocabulary has."""
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert open_it(write(tmp_path)).document_end == 1
