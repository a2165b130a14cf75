"""Byte-level text, compared with the joined files."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import TextConfig, decode_bytes, encode_bytes
from fsdptoys.errors import ConfigError
from tests.data.windows import assert_windows

DOCUMENTS = {
    "a.txt": b"first document",
    "deep/er/b.txt": "zweites, mit Umlaut: \u00e4\u00f6\u00fc".encode(),
    "deep/c.txt": b"x",
    "deep/empty.txt": b"",
    "d.txt": bytes(range(1, 256)),
    "note.md": b"not asked for",
}


def write_corpus(folder: Path, documents: dict[str, bytes] = DOCUMENTS) -> Path:
    for name, content in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("seq_len", "eval_fraction"), [(1, 0.0), (2, 0.0), (100, 0.0), (297, 0.0), (1, 0.5), (7, 0.5), (100, 0.5)]
)
def test_windows_follow_the_joined_files(tmp_path, seq_len, eval_fraction):
    """Oracle: slices of the files joined by zero bytes in the order of their names' hashes."""
    names = [name for name, content in DOCUMENTS.items() if name.endswith(".txt") and content]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    stream = np.frombuffer(b"\0".join(DOCUMENTS[name] for name in names), np.uint8)
    boundary = len(stream) - int(len(stream) * eval_fraction)
    config = TextConfig([f"{write_corpus(tmp_path)}/**/*.txt"], eval_fraction)
    dataset = config.build(seq_len, 256, seed=0)
    assert_windows(dataset.train, stream[:boundary], seq_len)
    assert config.has_eval == (dataset.eval is not None) == (eval_fraction > 0)
    if eval_fraction:
        assert_windows(dataset.eval, stream[boundary:], seq_len)


def test_order_and_fingerprint_do_not_depend_on_the_location(tmp_path, monkeypatch):
    """Oracle: a copy elsewhere, and a relative glob."""
    corpus = write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(write_corpus(tmp_path / "copy"))
    datasets = [TextConfig([pattern]).build(8, 256, 0) for pattern in (f"{corpus}/**/*.txt", "**/*.txt")]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    np.testing.assert_array_equal(datasets[0].train[3], datasets[1].train[3])


def test_file_listed_twice_counts_once(tmp_path):
    """Oracle: the same file named once."""
    corpus = write_corpus(tmp_path)
    once = TextConfig([f"{corpus}/d.txt"]).build(8, 256, 0)
    twice = TextConfig([f"{corpus}/d.txt", f"{corpus}/d*.txt"]).build(8, 256, 0)
    assert len(once.train) == len(twice.train)


def test_existing_path_with_glob_characters_is_read_literally(tmp_path):
    """Oracle: the file's content."""
    (tmp_path / "a[1].txt").write_bytes(b"0123456789")
    dataset = TextConfig([f"{tmp_path}/a[1].txt"], eval_fraction=0.0).build(9, 256, 0)
    assert decode_bytes(dataset.train[0][0]) == "012345678"


@pytest.mark.parametrize(
    ("documents", "settings"),
    [
        ({}, {"seq_len": 9}),
        ({}, {"seed": 1}),
        ({}, {"eval_fraction": 0.25}),
        ({"a.txt": b"First document"}, {}),
        ({"a.txt": b"first document!"}, {}),
        ({"a.txt": b"", "z.txt": DOCUMENTS["a.txt"]}, {}),
    ],
    ids=["sequence length", "seed", "share held out", "content", "size", "name"],
)
def test_fingerprint_depends_on_everything_that_determines_the_samples(tmp_path, documents, settings):
    """Oracle: one change at a time."""

    def fingerprint(folder: Path, seq_len: int = 8, seed: int = 0, eval_fraction: float = 0.05) -> str:
        return TextConfig([f"{folder}/**/*.txt"], eval_fraction).build(seq_len, 256, seed).fingerprint

    before = fingerprint(write_corpus(tmp_path / "before"))
    assert fingerprint(write_corpus(tmp_path / "again")) == before
    assert fingerprint(write_corpus(tmp_path / "after", DOCUMENTS | documents), **settings) != before


def test_unigram_entropy_covers_only_the_training_part(tmp_path, monkeypatch):
    """Oracle: the formula over a byte count by hand; a second value after cutting the counted part to 4 bytes."""
    (tmp_path / "a.txt").write_bytes(b"aaaabbcd" + b"zzzz")
    config = TextConfig([f"{tmp_path}/a.txt"], eval_fraction=1 / 3)
    dataset = config.build(2, 256, 0)
    assert dataset.unigram_entropy_nats == pytest.approx(1.75 * np.log(2))
    assert dataset.conditional_entropy_nats is None
    monkeypatch.setattr("fsdptoys.data.token_windows.CHUNK_TOKENS", 3)
    assert config.build(2, 256, 0).unigram_entropy_nats == pytest.approx(1.75 * np.log(2))
    monkeypatch.setattr("fsdptoys.data.token_windows.ENTROPY_BYTES", 4)
    assert config.build(2, 256, 0).unigram_entropy_nats == 0


def test_text_round_trips_through_bytes():
    """Oracle: Python's UTF-8; other ids and bytes become U+FFFD."""
    tokens_T = encode_bytes("def \u00e9\u20ac")
    assert tokens_T.dtype == np.int64 and tokens_T.tolist() == list("def \u00e9\u20ac".encode())
    assert decode_bytes(tokens_T) == "def \u00e9\u20ac"
    assert decode_bytes([104, 300, 105, -1, 0xC3]) == "h\ufffdi\ufffd\ufffd"
    assert encode_bytes("").shape == (0,) and decode_bytes([]) == ""


def test_stdlib_is_the_source_of_python_without_tests():
    """Oracle: the directory of the running interpreter."""
    config = TextConfig()
    config.validate(512, 256)
    dataset = config.build(512, 256, 0)
    names = {file.name for file in dataset.train.stream.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    sizes = [os.path.getsize(os.path.join(sysconfig.get_paths()["stdlib"], name)) for name in names]
    total = sum(sizes) + len(names) - 1
    assert total > 5_000_000
    assert dataset.train.stop + int(total * 0.05) == total
    assert len(dataset.eval) == (int(total * 0.05) - 1) // 512


def test_interpreter_without_source_files_is_reported(tmp_path, monkeypatch):
    """Oracle: the expected message, over an empty directory in place of the standard library."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^data\.files=\[stdlib\] finds no source files in .*; set data\.files="):
        TextConfig().validate(8, 256)


def test_unreadable_file_is_reported(tmp_path, monkeypatch):
    """Oracle: the expected message; ``os.access`` answers for a user who is not root."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"a\.txt\] may not be read by this user; change its permissions or take it"):
        TextConfig([f"{write_corpus(tmp_path)}/a.txt"]).validate(8, 256)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Path.unlink, "can no longer be read (No such file or directory); restore it or change data.files"),
        (lambda path: path.write_bytes(b"short"), "has fewer than the 255 bytes it had when the run started; restore"),
    ],
    ids=["removed", "shortened"],
)
def test_file_changed_during_a_run_is_reported(tmp_path, change, sentence):
    """Oracle: the expected message."""
    dataset = TextConfig([f"{write_corpus(tmp_path)}/d.txt"]).build(8, 256, 0)
    change(tmp_path / "d.txt")
    with pytest.raises(ConfigError) as caught:
        dataset.train[20]
    assert f"d.txt] {sentence}" in str(caught.value)
