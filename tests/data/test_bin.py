"""Binary token files, compared with ``np.fromfile``."""

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX, BinConfig, TokenDType
from fsdptoys.errors import ConfigError

VOCAB = 70_000


def write_tokens(path, count: int, dtype: str, seed: int = 0) -> None:
    limit = min(VOCAB, np.iinfo(dtype).max + 1)
    np.random.default_rng(seed).integers(0, limit, count).astype(dtype).tofile(path)


@pytest.mark.parametrize("dtype", list(TokenDType))
@pytest.mark.parametrize("seq_len", [1, 5, 39])
def test_windows_follow_the_concatenated_files(tmp_path, dtype, seq_len):
    """Oracle: ``np.fromfile`` of all files, joined; windows longer than a file cross several."""
    for number, count in enumerate([17, 1, 3, 20]):
        write_tokens(tmp_path / f"part{number}.bin", count, dtype.value, seed=number)
    stream = np.concatenate([np.fromfile(tmp_path / f"part{number}.bin", dtype.value) for number in range(4)])
    config = BinConfig([f"{tmp_path}/part0.bin", f"{tmp_path}/part[1-9].bin"], dtype)
    config.validate(seq_len, VOCAB)
    samples = config.build(seq_len, VOCAB, seed=0).train
    assert len(samples) == 40 // seq_len
    for index in range(len(samples)):
        tokens_T, labels_T = samples[index]
        window = stream[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64)
        np.testing.assert_array_equal(tokens_T, window[:-1])
        np.testing.assert_array_equal(labels_T, window[1:])
        assert tokens_T.dtype == labels_T.dtype == np.int64


def test_labels_can_end_at_document_boundaries(tmp_path):
    """Oracle: a loop over the tokens; the fingerprint differs, so checkpoints of other labels are refused."""
    path, end = tmp_path / "train.bin", 3
    np.random.default_rng(0).integers(0, 8, 200).astype("uint16").tofile(path)
    config = BinConfig([str(path)], document_end=end, eval_fraction=0.2)
    config.validate(10, VOCAB)
    plain, dataset = config.build(10, VOCAB, seed=0), config.build(10, VOCAB, seed=0)
    dataset.end_labels_with_documents()
    assert dataset.fingerprint != plain.fingerprint and len(dataset.train) == len(plain.train)
    for before, after in ((plain.train, dataset.train), (plain.eval, dataset.eval)):
        for index in range(len(before)):
            tokens_T, labels_T = before[index]
            expected = [
                IGNORE_INDEX if token == end else label for token, label in zip(tokens_T, labels_T, strict=True)
            ]
            np.testing.assert_array_equal(after[index][0], tokens_T)
            np.testing.assert_array_equal(after[index][1], expected)


@pytest.mark.parametrize("held_out", ["fraction", "files", "none"])
def test_held_out_part_is_the_tail_or_separate_files(tmp_path, held_out):
    """Oracle: slices of ``np.fromfile``."""
    train_path, eval_path = tmp_path / "train.bin", tmp_path / "val.bin"
    write_tokens(train_path, 100, "uint16")
    write_tokens(eval_path, 30, "uint16", seed=1)
    settings = {"fraction": {"eval_fraction": 0.3}, "files": {"eval_files": [str(eval_path)]}, "none": {}}[held_out]
    config = BinConfig([str(train_path)], **settings)
    config.validate(10, VOCAB)
    dataset = config.build(10, VOCAB, seed=0)
    tokens = np.fromfile(train_path, "uint16")
    expected = {"fraction": tokens[70:], "files": np.fromfile(eval_path, "uint16"), "none": None}[held_out]
    assert config.has_eval == (expected is not None)
    assert not hasattr(dataset, "decode")
    assert len(dataset.train) == (6 if held_out == "fraction" else 9)
    if expected is None:
        assert dataset.eval is None
    else:
        assert len(dataset.eval) == 2
        np.testing.assert_array_equal(dataset.eval[1][1], expected[11:21])


def test_fingerprint_depends_on_everything_that_determines_the_samples(tmp_path):
    """Oracle: one change at a time, including the dtype; held-out files do not change the fingerprint."""
    paths = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    for number, path in enumerate(paths):
        write_tokens(path, 100, "uint16", seed=number)
    configs = [
        BinConfig(paths),
        BinConfig(paths[::-1]),
        BinConfig(paths[:1]),
        BinConfig(paths[:1], eval_fraction=0.5),
        BinConfig(paths[:1], dtype=TokenDType.uint32),
    ]
    prints = [config.build(4, 2**32, 0).fingerprint for config in configs]
    assert len(set(prints)) == len(prints)
    assert BinConfig(paths[:1], eval_files=paths[1:]).build(4, 2**32, 0).fingerprint == prints[2]


def test_unigram_entropy_matches_the_token_frequencies(tmp_path):
    """Oracle: the formula for four tokens of equal frequency."""
    np.tile(np.array([1, 5, 9, 65_000], dtype="uint32"), 25).tofile(tmp_path / "a.bin")
    dataset = BinConfig([f"{tmp_path}/a.bin"], TokenDType.uint32).build(8, VOCAB, 0)
    assert dataset.unigram_entropy_nats == pytest.approx(np.log(4))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens("good.bin", 100, "uint16")
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"123")
    np.arange(100, dtype="uint16").tofile("high.bin")
    np.arange(3, dtype="uint16").tofile("short.bin")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "data.files=[] names no file; set data.files=[path/to/train.bin]"),
        (
            {"files": ["empty.bin"]},
            "data.files=[empty.bin] is an empty file; take it out of data.files or write it again",
        ),
        (
            {"files": ["em*.bin"]},
            "data.files=[empty.bin] is an empty file; take it out of data.files or write it again",
        ),
        (
            {"files": ["odd.bin"]},
            "data.files=[odd.bin] has 3 bytes, which is not a multiple of the 2 bytes of data.dtype=uint16; "
            "write it again or set data.dtype to that of the file",
        ),
        (
            {"files": ["short.bin", "high.bin"]},
            "data.files=[high.bin] has token 50 at position 50, outside model.vocab_size=50; "
            "set model.vocab_size to at least 51, or repair the file or data.dtype",
        ),
        (
            {"files": ["short.bin"], "eval_files": ["high.bin"]},
            "data.eval_files=[high.bin] has token 50 at position 50, outside model.vocab_size=50; "
            "set model.vocab_size to at least 51, or repair the file or data.dtype",
        ),
        (
            {"files": ["high.bin"], "eval_files": ["short.bin", "./high.bin"]},
            "data.eval_files=[./high.bin] is also in data.files, so that it would not be held out; "
            "take it out of one of them",
        ),
        (
            {"files": ["high.bin"], "eval_files": ["one.bin"]},
            "train.seq_len=2 needs 3 tokens for one sequence, but data.eval_files has 1; add files to data.eval_files",
        ),
        (
            {"files": ["high.bin"], "eval_files": ["short.bin"], "eval_fraction": 0.1},
            "data.eval_fraction=0.1 and data.eval_files exclude each other; "
            "set data.eval_fraction=0 or data.eval_files=[]",
        ),
        (
            {"files": ["high.bin"], "eval_fraction": -0.5},
            "data.eval_fraction=-0.5 must be at least 0 and below 1; set data.eval_fraction=0.0",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_mistakes_are_reported_in_one_sentence(settings, sentence):
    """Oracle: the expected message."""
    np.zeros(1, dtype="uint16").tofile("one.bin")
    with pytest.raises(ConfigError) as caught:
        BinConfig(**settings).validate(2, 50)
    assert str(caught.value) == sentence


def test_out_of_range_token_is_reported_when_read(tmp_path, monkeypatch):
    """Oracle: the expected message, with the position in the file rather than in the window or the stream."""
    monkeypatch.setattr("fsdptoys.data.token_files.HEAD_BYTES", 64)
    np.zeros(10, dtype="uint16").tofile(tmp_path / "a.bin")
    tokens = np.zeros(100_000, dtype="uint16")
    tokens[50_000] = 51
    tokens.tofile(tmp_path / "b.bin")
    config = BinConfig([f"{tmp_path}/a.bin", f"{tmp_path}/b.bin"])
    config.validate(8, 50)
    samples = config.build(8, 50, 0).train
    for index in range(6200, 6300):
        if 10 + 50_000 in range(index * 8, index * 8 + 9):
            with pytest.raises(
                ConfigError, match=r"b\.bin\] has token 51 at position 50000, outside model\.vocab_size=50;"
            ):
                samples[index]
        else:
            assert not samples[index][0].any()
