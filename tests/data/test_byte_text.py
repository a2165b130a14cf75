"""Byte-level text, compared with the joined files."""

import hashlib
import os
import sysconfig

import numpy as np
import pytest

from fsdptoys.data import TextConfig, decode_bytes, encode_bytes
from fsdptoys.errors import ConfigError

DOCUMENTS = {
    "a.txt": b"first document",
    "deep/er/b.txt": "zweites, mit Umlaut: \u00e4\u00f6\u00fc".encode(),
    "deep/c.txt": b"x",
    "deep/empty.txt": b"",
    "d.txt": bytes(range(1, 256)),
    "note.md": b"not asked for",
}


@pytest.fixture
def corpus(tmp_path):
    for name, content in DOCUMENTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def joined(names: list[str]) -> bytes:
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return b"\0".join(DOCUMENTS[name] for name in ordered if DOCUMENTS[name])


@pytest.mark.parametrize(
    ("seq_len", "eval_fraction"), [(1, 0.0), (2, 0.0), (100, 0.0), (297, 0.0), (1, 0.5), (7, 0.5), (100, 0.5)]
)
def test_windows_follow_the_joined_files(corpus, seq_len, eval_fraction):
    """Oracle: slices of the files joined by zero bytes in the order of their names' hashes."""
    stream = joined([name for name in DOCUMENTS if name.endswith(".txt")])
    boundary = len(stream) - int(len(stream) * eval_fraction)
    config = TextConfig([f"{corpus}/**/*.txt"], eval_fraction)
    dataset = config.build(seq_len, 256, seed=0)
    assert config.has_eval == (eval_fraction > 0)
    parts = [(dataset.train, stream[:boundary])]
    if eval_fraction:
        parts.append((dataset.eval, stream[boundary:]))
    else:
        assert dataset.eval is None
    for samples, content in parts:
        assert len(samples) == (len(content) - 1) // seq_len
        for index in range(len(samples)):
            tokens_T, labels_T = samples[index]
            begin = index * seq_len
            assert tokens_T.dtype == labels_T.dtype == np.int64
            assert bytes(tokens_T.tolist()) == content[begin : begin + seq_len]
            assert bytes(labels_T.tolist()) == content[begin + 1 : begin + seq_len + 1]
        with pytest.raises(IndexError):
            samples[len(samples)]


def test_order_and_fingerprint_do_not_depend_on_the_location(corpus, tmp_path_factory, monkeypatch):
    """Oracle: a copy elsewhere, and a relative glob."""
    copy = tmp_path_factory.mktemp("copy")
    for name, content in DOCUMENTS.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    monkeypatch.chdir(copy)
    datasets = [TextConfig([pattern]).build(8, 256, 0) for pattern in (f"{corpus}/**/*.txt", "**/*.txt")]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    np.testing.assert_array_equal(datasets[0].train[3], datasets[1].train[3])


def test_file_listed_twice_counts_once(corpus):
    """Oracle: the same files named once."""
    once = TextConfig([f"{corpus}/d.txt"]).build(8, 256, 0)
    twice = TextConfig([f"{corpus}/d.txt", f"{corpus}/d*.txt"]).build(8, 256, 0)
    assert len(once.train) == len(twice.train)


def test_existing_path_with_glob_characters_is_read_literally(tmp_path):
    """Oracle: the file's content."""
    (tmp_path / "a[1].txt").write_bytes(b"0123456789")
    dataset = TextConfig([f"{tmp_path}/a[1].txt"], eval_fraction=0.0).build(9, 256, 0)
    assert decode_bytes(dataset.train[0][0]) == "012345678"


@pytest.mark.parametrize("change", ["seq_len", "seed", "eval_fraction", "content", "size", "name"])
def test_fingerprint_depends_on_everything_that_determines_the_samples(corpus, change):
    """Oracle: one change at a time."""
    config = TextConfig([f"{corpus}/**/*.txt"])
    before = config.build(8, 256, 0).fingerprint
    assert config.build(8, 256, 0).fingerprint == before
    if change == "eval_fraction":
        config = TextConfig(config.files, 0.25)
    elif change == "content":
        (corpus / "a.txt").write_bytes(b"First document")
    elif change == "size":
        (corpus / "a.txt").write_bytes(b"first document!")
    elif change == "name":
        (corpus / "a.txt").rename(corpus / "z.txt")
    after = config.build(9 if change == "seq_len" else 8, 256, 1 if change == "seed" else 0)
    assert after.fingerprint != before


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


@pytest.mark.parametrize(
    ("settings", "seq_len", "vocab_size", "sentence"),
    [
        ({"eval_fraction": 1.0}, 8, 256, "data.eval_fraction=1.0 must be at least 0 and below 1; set data."),
        ({"eval_fraction": float("nan")}, 8, 256, "data.eval_fraction=nan must be at least 0 and below 1; set data."),
        (
            {},
            8,
            255,
            "model.vocab_size=255 must be at least 256 for data=text, one id a byte; set model.vocab_size=256",
        ),
        ({"files": []}, 8, 256, "data.files=[] names no file; set data.files=[stdlib] or data.files=[path/to/*.txt]"),
        ({"files": ["none*"]}, 8, 256, "data.files=[none*] matches no file; set data.files to paths or globs of files"),
        (
            {"files": ["gone"]},
            8,
            256,
            "data.files=[gone] does not exist; set data.files to files that do, as seen from",
        ),
        (
            {"files": ["deep"]},
            8,
            256,
            "data.files=[deep] is a directory; set data.files=[deep/**] for all files below it",
        ),
        (
            {"files": ["fifo"]},
            8,
            256,
            "data.files=[fifo] is not a regular file; set data.files to files that are on disk",
        ),
        (
            {"files": ["deep/empty.txt"]},
            8,
            256,
            "data.files=[deep/empty.txt] is an empty file; take it out of data.files or write it again",
        ),
        (
            {"files": ["deep/empty*"]},
            8,
            256,
            "train.seq_len=8 needs 9 tokens for one sequence, but the training part of data.files has 0; add files",
        ),
        (
            {"files": ["a.txt"], "eval_fraction": 0.0},
            14,
            256,
            "train.seq_len=14 needs 15 tokens for one sequence, but the training part of data.files has 14; "
            "set train.seq_len=13 or add files to data.files",
        ),
        (
            {"files": ["d.txt"], "eval_fraction": 0.02},
            8,
            256,
            "train.seq_len=8 needs 9 tokens for one sequence, but the part held out by data.eval_fraction=0.02 has 5; "
            "set train.seq_len=4 or set data.eval_fraction higher, or to 0 for none",
        ),
    ],
)
def test_mistakes_are_reported_in_one_sentence(corpus, monkeypatch, settings, seq_len, vocab_size, sentence):
    """Oracle: the expected message, or its start if the rest has paths of this machine."""
    monkeypatch.chdir(corpus)
    os.mkfifo(corpus / "fifo")
    with pytest.raises(ConfigError) as caught:
        TextConfig(**settings).validate(seq_len, vocab_size)
    assert str(caught.value).startswith(sentence)


def test_unreadable_file_is_reported(corpus, monkeypatch):
    """Oracle: the expected message; ``os.access`` answers for a user who is not root."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"a\.txt\] may not be read by this user; change its permissions or take it"):
        TextConfig([f"{corpus}/a.txt"]).validate(8, 256)


@pytest.mark.parametrize("change", ["removed", "shortened"])
def test_file_changed_during_a_run_is_reported(corpus, change):
    """Oracle: the expected message."""
    dataset = TextConfig([f"{corpus}/d.txt"]).build(8, 256, 0)
    if change == "removed":
        (corpus / "d.txt").unlink()
        sentence = r"d\.txt\] can no longer be read \(No such file or directory\); restore it or change data\.files"
    else:
        (corpus / "d.txt").write_bytes(b"short")
        sentence = r"d\.txt\] has fewer than the 255 bytes it had when the run started; restore it"
    with pytest.raises(ConfigError, match=sentence):
        dataset.train[20]
