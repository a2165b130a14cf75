"""Long text files are prepared with one copy in memory and produce the same folder as short ones."""

import gzip
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from fsdptoys.data import HFConfig, PreparedConfig, TextConfig, find_sources, prepare_folder
from fsdptoys.data import document_reader as documents
from fsdptoys.data.document_reader import read_documents
from fsdptoys.errors import ConfigError
from tests.data.test_prepare import contents, request, save_tokenizer


def write_texts(folder: Path) -> list[Path]:
    """Texts of 1 to 9,000 characters of one to four bytes, with zero bytes in some; every third is compressed."""
    drawn, paths = random.Random(0), []
    for number in range(24):
        text = "".join(drawn.choice("ab \né€😀\0") for _ in range(drawn.choice([1, 3, 700, 9000])))
        text = "\0" * 9000 if number == 7 else text
        path = folder / (f"{number:02d}.txt" + ".gz" * (number % 3 == 0))
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        paths.append(path)
    return paths


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("eval_fraction", [0.0, 0.4])
def test_streamed_long_texts_produce_the_same_folder(
    processes: int, eval_fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same files prepared as short texts; characters cross the edges of blocks."""
    files = write_texts(tmp_path)
    # A long text ends its group, as texts from LONG_BYTES on do.
    monkeypatch.setattr("fsdptoys.data.prepare.GROUP_CHARACTERS", 500)
    changes = {"eval_fraction": eval_fraction, "shard_tokens": 9000}
    short = prepare_folder(request(tmp_path / "short", *files, **changes))
    monkeypatch.setattr(documents, "LONG_BYTES", 500)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    long = prepare_folder(request(tmp_path / "long", *files, **changes, processes=processes))
    assert contents(tmp_path / "long") == contents(tmp_path / "short")
    assert long == short and long.left_out > 0 and len(long.shards) > 3


@pytest.mark.parametrize("place", [0, 63, 64, 65, 700, 998, 999])
@pytest.mark.parametrize("wrong", [b"\xff", b"\xe2\x82", b"\x82\x82\x82\x82\x82"])
def test_invalid_utf_8_is_reported_with_its_byte_position(
    place: int, wrong: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the position reported by Python's decoder for the full text."""
    content = b"a" * place + wrong + b"b" * (999 - place)
    (tmp_path / "a.txt").write_bytes(content)
    monkeypatch.setattr(documents, "LONG_BYTES", 500)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    with pytest.raises(UnicodeDecodeError) as expected:
        content.decode()
    with pytest.raises(ConfigError, match=rf"holds no text in UTF-8 \(byte {expected.value.start}\)"):
        prepare_folder(request(tmp_path / "out", tmp_path / "a.txt"))


def test_long_text_is_held_in_memory_once(tmp_path: Path) -> None:
    """Oracle: the peak that tracemalloc sees, of two compressed texts of 24 MiB, at most 1.5 times one of them."""
    size = 24 * 2**20
    for name in "ab":
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(b"0123456789abcde\n" * (size // 16), 1))
    wanted = request(tmp_path / "out", tmp_path / "a.txt.gz", tmp_path / "b.txt.gz")
    tracemalloc.start()
    try:
        index = prepare_folder(wanted)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.tokens("train") == 2 * (size + 1)
    assert peak < 1.5 * size


@pytest.mark.parametrize("where", ["document_reader._open", "prepare._encode"])
def test_document_too_large_for_memory_is_reported(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, where the system refuses memory while a file is read, and while it is encoded."""

    def refuse(*_: object) -> None:
        raise MemoryError

    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setattr(f"fsdptoys.data.{where}", refuse)
    with pytest.raises(ConfigError, match=r"^data\.files\S* holds a document that does not fit .* data=prepared$"):
        HFConfig(files=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), processes=1).prepare(4, 256)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 200_000, "has no JSON object in line 2 ("),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "has no JSON object in line 2 ("),
        ('{"text": ' + "[" * 900 + "]" * 900 + "}", "as text in line 2, which is no text"),
        ('{"text": 1' + "0" * 4000 + "}", "as text in line 2, which is no text"),
        ('{"text": -Infinity}', "has -inf as text in line 2, which is no text"),
        ('{"a\\u001b[31m": 1}', "has no field 'text' in line 2: it has a\\x1b[31m;"),
        ('{"text": "a"', "has no JSON object in line 2 ("),
        ("\udcff", "has no JSON object in line 2 ("),
    ],
)
def test_invalid_row_is_reported_with_its_line(line: str, reason: str, tmp_path: Path) -> None:
    """Oracle: one printable sentence with the number of the line."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError) as caught:
        list(read_documents("data.files", find_sources("data.files", [str(tmp_path / "a.jsonl")])[0], "text"))
    assert reason in str(caught.value) and str(caught.value).isprintable()


def test_unused_fields_and_lone_surrogates_are_accepted(tmp_path: Path) -> None:
    """Oracle: Python's own reader; the field's text is all that counts."""
    rows = ['{"text": "a", "n": 1' + "0" * 400 + "}", '{"text": "b\\ud800"}', '{"text": "c", "x": NaN}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (source,) = find_sources("data.files", [str(tmp_path / "a.jsonl")])
    assert [text for text, _ in read_documents("data.files", source, "text")] == ["a", "b\ud800", "c"]
    assert prepare_folder(request(tmp_path / "out", tmp_path / "a.jsonl")).documents("train") == 3


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "folder", "saved"])
def test_irregular_files_are_refused_without_blocking(name: str, tmp_path: Path) -> None:
    """Oracle: the expected message; reading would block forever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "saved").mkdir()
    for mark in documents.SAVED_MARKS:
        (tmp_path / "saved" / mark).write_text("{}")
    os.mkfifo(tmp_path / "saved" / "data-00000-of-00001.arrow")
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"is not a regular file|is no regular file|is a directory"):
        HFConfig(files=[path], cache=str(tmp_path / "cache")).validate(4, 256)
    with pytest.raises(ConfigError, match=r"is not a regular file|is a directory"):
        TextConfig(files=[path]).validate(4, 256)


def test_named_pipes_in_place_of_tokenizer_files_are_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages, for the tokenizer, its settings, and the copy in a prepared folder."""
    pytest.importorskip("tokenizers")
    choice = Path(save_tokenizer(tmp_path / "tokenizer", None))
    (tmp_path / "a.txt").write_text("one two")
    config = HFConfig(files=[str(tmp_path / "a.txt")], tokenizer=str(choice), cache=str(tmp_path / "cache"))
    config.prepare(1, 256)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"cannot be read \(it is a named pipe and not a regular file\)"):
        PreparedConfig(folder=str(folder)).find_tokenizer()
    os.mkfifo(choice / "tokenizer_config.json")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read \(it is a named pipe"):
        config.validate(1, 256)
    (choice / "tokenizer.json").unlink()
    os.mkfifo(choice / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"names no existing tokenizer\.json"):
        config.validate(1, 256)
