"""Preparing data with unusual files, folders or permissions."""

import errno
import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.data import PreparedConfig, find_sources, open_encoder, prepare_folder
from fsdptoys.data.packing import Packing
from fsdptoys.data.text_encoder import ByteEncoder
from fsdptoys.errors import ConfigError
from tests.cli.test_place_mistakes import as_other_user
from tests.data.test_prepare import StoppedError, contents, documents, read_split, request, save_tokenizer, write_lines


def test_resume_with_unremovable_leftovers_gives_identical_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an uninterrupted run; a folder among the shards cannot be removed as a file."""
    monkeypatch.setattr("fsdptoys.data.prepare.GROUP_CHARACTERS", 500)
    monkeypatch.setattr("fsdptoys.data.shard_writer.SAVE_TOKENS", 1500)
    lines = write_lines(tmp_path / "a.jsonl", documents(100))

    def stop(advance: Any) -> None:
        if advance.documents > 60:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_folder(request(tmp_path / "out", lines), stop)
    (tmp_path / "out.part" / "thumbnails").mkdir()
    for out in ("out", "fresh"):
        prepare_folder(request(tmp_path / out, lines))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_pickled_tokenizer_encodes_special_tokens_as_text(tmp_path: Path) -> None:
    """Oracle: the ids of the tokenizer before pickling, which spawned processes need."""
    pytest.importorskip("tokenizers")
    encoder = open_encoder(save_tokenizer(tmp_path / "tokenizer", None), None, "", "")
    text = ["one <|endoftext|> two"]
    ids, again = (each.encode(text)[0].tolist() for each in (encoder, pickle.loads(pickle.dumps(encoder))))
    assert ids == again and encoder.document_end not in ids


def test_file_names_need_not_be_valid_unicode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: its bytes, read back; the index and the command's JSON are read by other programs."""
    name = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    try:
        Path(os.fsdecode(name)).write_text("a text")
    except OSError:
        pytest.skip("this file system has no such names")
    prepare_folder(request(tmp_path / "out", os.fsdecode(name)))
    assert read_split(tmp_path / "out", "train") == [b"a text"]
    assert data_command(["show", str(tmp_path / "out"), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert os.fsencode(shown["sources"][0]["name"]) == b"caf\xe9.txt"


def test_folders_without_permission_are_reported_in_one_sentence(tmp_path: Path) -> None:
    """Oracle: the expected messages, of a folder of data and of files to prepare."""
    lines = write_lines(tmp_path / "a.jsonl", documents(9))
    folder = str(tmp_path / "out")
    prepare_folder(request(Path(folder), lines))
    tmp_path.chmod(0)
    with as_other_user():
        with pytest.raises(ConfigError) as caught:
            PreparedConfig(folder=folder).validate(8, 256)
        assert str(caught.value) == (
            f"data.folder={folder} cannot be read (Permission denied); change its permissions or name another"
        )
        with pytest.raises(ConfigError, match=r" does not exist; set FILE to files that do"):
            find_sources("FILE", [str(lines)])
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("file", ["shard-00000.bin", pytest.param("shard-00000.ends", marks=pytest.mark.extended)])
def test_check_continues_past_an_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """Oracle: a sentence for that file, and one for another damaged one."""
    prepare_folder(request(tmp_path / "out", write_lines(tmp_path / "a.jsonl", documents(99)), shard_tokens=3000))
    with open(tmp_path / "out" / "shard-00001.bin", "r+b") as damaged:
        damaged.write(b"\x01\x00\x02\x00")

    def refusing(path: Path) -> Any:
        if path.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open(path, "rb")

    monkeypatch.setattr("fsdptoys.data.dataset_index.open_regular", refusing)
    assert data_command(["check", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert f"{file} cannot be read (Input/output error)\n" in err
    assert "shard-00001.bin differs from its index: its SHA-256 is " in err


def test_unreadable_data_is_not_reported_as_an_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the message names the folder of the data."""
    folder = str(tmp_path / "out")
    prepare_folder(request(Path(folder), write_lines(tmp_path / "a.jsonl", documents(99))))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("fsdptoys.data.packing.read_ends", refuse)
    config = PreparedConfig(folder=folder, packing=Packing.best_fit, cache=str(tmp_path / "cache"))
    with pytest.raises(ConfigError) as caught:
        config.prepare(16, 256)
    assert str(caught.value) == f"{folder} cannot be read (Permission denied); make it readable"


@pytest.mark.parametrize("offset", [300, *(pytest.param(offset, marks=pytest.mark.extended) for offset in (600, 8000))])
def test_damaged_arrow_file_is_reported_in_one_sentence(tmp_path: Path, offset: int) -> None:
    """Oracle: the expected message for damage in the header and in parts read later."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["a" * 50] * 5000}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    content = bytearray(arrow.read_bytes())
    content[offset : offset + 64] = b"\xff" * 64
    arrow.write_bytes(content)
    with pytest.raises(ConfigError, match=r" cannot be read by datasets \(.*; save it again or leave it out$"):
        prepare_folder(request(tmp_path / "out", tmp_path / "saved"))


def test_too_deeply_nested_json_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """Oracle: the expected message, with the line."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl\] has no JSON object in line 2 \("):
        prepare_folder(request(tmp_path / "out", tmp_path / "a.jsonl"))


def test_texts_with_equal_ids_share_a_split(tmp_path: Path) -> None:
    """Oracle: sets of documents; half of the texts differ only in a zero byte, which the byte tokenizer omits."""
    texts: list[str | None] = [f"document {number}" + "\0" * zeros for number in range(200) for zeros in (0, 1)]
    prepare_folder(request(tmp_path / "out", write_lines(tmp_path / "a.jsonl", texts), eval_fraction=0.3))
    train, held_out = (set(read_split(tmp_path / "out", split)) for split in ("train", "eval"))
    assert len(train) + len(held_out) == 200 and len(held_out) > 30


def test_byte_ids_take_one_byte_each_in_memory() -> None:
    """Oracle: the dtype; a document of 1 GB must not need 8 GB for its ids."""
    (ids,) = ByteEncoder().encode(["abc"])
    assert ids.dtype == np.uint8 and ids.tolist() == [97, 98, 99]


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=pytest.mark.extended)])
def test_data_is_prepared_without_a_stderr(tmp_path: Path, redirection: str) -> None:
    """Oracle: the folder prepared with a stderr; every group prints a progress line."""
    lines = write_lines(tmp_path / "a.jsonl", documents(30))
    prepare_folder(request(tmp_path / "heard", lines))
    program = (
        "from fsdptoys.data import HFConfig, progress; progress.LINE_SECONDS = 0.0; "
        f"HFConfig(files=[{str(lines)!r}], cache={str(tmp_path / 'cache')!r}, processes=1).prepare(16, 256)"
    )
    subprocess.run(["bash", "-c", f"exec {sys.executable} -c {shlex.quote(program)} {redirection}"], check=True)
    (folder,) = (tmp_path / "cache").iterdir()
    assert contents(folder) == contents(tmp_path / "heard")
