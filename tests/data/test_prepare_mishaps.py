"""Preparing data from long texts and unusual files, and without permissions."""

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.data import document_reader, prepare_folder, tables
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from tests.harness.prepared_data import (
    contents,
    read_split,
    request,
    save_tokenizer,
)


def test_file_names_need_not_be_valid_unicode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: its bytes, read back; the index and the command's JSON are read by other programs."""
    name = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    try:
        Path(os.fsdecode(name)).write_text("a text")
    except OSError:
        pytest.skip("this file system has no such names")
    prepare_folder(request(tmp_path / "out", os.fsdecode(name)))
    assert read_split(tmp_path / "out", "train") == [b"a text"]
    assert data_command(["show", str(tmp_path / "out"), "--json"]) == 0
    (index,) = json.loads(capsys.readouterr().out)
    assert os.fsencode(index["sources"][0]["name"]) == b"caf\xe9.txt"


def test_damaged_arrow_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """Oracle: the expected message for damage in the header."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["a" * 50] * 5000}).save_to_disk(
        tmp_path / "saved"
    )
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    content = bytearray(arrow.read_bytes())
    content[300:364] = b"\xff" * 64
    arrow.write_bytes(content)
    with pytest.raises(
        ConfigError,
        match=r" cannot be read by datasets \(.*; save it again or leave it out$",
    ):
        prepare_folder(request(tmp_path / "out", tmp_path / "saved"))


def write_texts(folder: Path) -> list[Path]:
    """Texts of 1 to 9,000 characters of one to four bytes, with zero bytes in some; every third is
    compressed."""
    drawn = random.Random(0)
    paths = []
    for number in range(24):
        text = "".join(
            drawn.choice("ab \né€😀\0") for _ in range(drawn.choice([1, 3, 700, 9000]))
        )
        text = "\0" * 9000 if number == 7 else text
        path = folder / (f"{number:02d}.txt" + ".gz" * (number % 3 == 0))
        path.write_bytes(
            gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
        )
        paths.append(path)
    return paths


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("eval_fraction", [0.0, 0.4])
def test_streamed_long_texts_produce_the_same_folder(
    processes: int,
    eval_fraction: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the same files prepared as short texts; characters cross the edges of blocks."""
    files = write_texts(tmp_path)
    # A long text ends its group, as texts from LONG_BYTES on do.
    monkeypatch.setattr("fsdptoys.data.encoded_groups.GROUP_CHARACTERS", 500)
    changes = {"eval_fraction": eval_fraction, "shard_tokens": 9000}
    short = prepare_folder(request(tmp_path / "short", *files, **changes))
    monkeypatch.setattr(document_reader, "LONG_BYTES", 500)
    monkeypatch.setattr(document_reader, "BLOCK_BYTES", 64)
    long = prepare_folder(
        request(tmp_path / "long", *files, **changes, processes=processes)
    )
    assert contents(tmp_path / "long") == contents(tmp_path / "short")
    assert long == short and long.left_out > 0 and len(long.shards) > 3


@pytest.mark.parametrize("long_bytes", [500, 2000])
@pytest.mark.parametrize("offset", [0, 63, 64, 999])
def test_invalid_utf_8_is_reported(
    offset: int, long_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, of a short and of a long text."""
    (tmp_path / "a.txt").write_bytes(
        b"a" * offset + b"\xe2\x82" + b"b" * (999 - offset)
    )
    monkeypatch.setattr(document_reader, "LONG_BYTES", long_bytes)
    monkeypatch.setattr(document_reader, "BLOCK_BYTES", 64)
    with pytest.raises(
        ConfigError, match=r"a\.txt\] holds no text in UTF-8; write it in UTF-8 or"
    ):
        prepare_folder(request(tmp_path / "out", tmp_path / "a.txt"))


def test_long_text_is_held_in_memory_once(tmp_path: Path) -> None:
    """Oracle: the peak that tracemalloc sees, of two compressed texts of 24 MiB, at most 1.5 times
    one of them."""
    size = 24 * 2**20
    for name in "ab":
        (tmp_path / f"{name}.txt.gz").write_bytes(
            gzip.compress(b"0123456789abcde\n" * (size // 16), 1)
        )
    long_request = request(
        tmp_path / "out", tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"
    )
    tracemalloc.start()
    try:
        index = prepare_folder(long_request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.tokens("train") == 2 * (size + 1)
    assert peak < 1.5 * size


@pytest.mark.parametrize(
    "where", ["document_reader.open_content", "encoded_groups._encode"]
)
def test_document_too_large_for_memory_is_reported(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, where the system refuses memory while a file is read, and while
    it is encoded."""

    def refuse(*_: object) -> None:
        raise MemoryError

    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setattr(f"fsdptoys.data.{where}", refuse)
    with pytest.raises(
        ConfigError,
        match=r"^data\.files\S* holds a document that does not fit .* data=prepared$",
    ):
        HFConfig(
            files=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), processes=1
        ).prepare(4, 256)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "folder", "saved"])
def test_irregular_files_are_refused_without_blocking(
    name: str, tmp_path: Path
) -> None:
    """Oracle: the expected message; reading would block forever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / tables.SAVED_MARK).write_text("{}")
    os.mkfifo(tmp_path / "saved" / "data-00000-of-00001.arrow")
    path = str(tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"is not a regular file|is no regular file|is a directory"
    ):
        HFConfig(files=[path], cache=str(tmp_path / "cache")).validate(4, 256)
    with pytest.raises(ConfigError, match=r"is not a regular file|is a directory"):
        TextConfig(files=[path]).validate(4, 256)


def test_named_pipes_in_place_of_tokenizer_files_are_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages, for the tokenizer, its settings, and the copy in a prepared
    folder."""
    pytest.importorskip("tokenizers")
    choice = Path(save_tokenizer(tmp_path / "tokenizer", None))
    (tmp_path / "a.txt").write_text("one two")
    config = HFConfig(
        files=[str(tmp_path / "a.txt")],
        tokenizer=str(choice),
        cache=str(tmp_path / "cache"),
    )
    config.prepare(1, 256)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(
        ConfigError,
        match=r"cannot be read \(it is a named pipe and not a regular file\)",
    ):
        PreparedConfig(folder=str(folder)).find_tokenizer()
    os.mkfifo(choice / "tokenizer_config.json")
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json cannot be read \(it is a named pipe"
    ):
        config.validate(1, 256)
    (choice / "tokenizer.json").unlink()
    os.mkfifo(choice / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"names no existing tokenizer\.json"):
        config.validate(1, 256)
