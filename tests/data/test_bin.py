"""Binary token files, compared with ``np.fromfile``."""

from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX, BinConfig, TokenDType
from fsdptoys.errors import ConfigError
from tests.data.windows import assert_windows, write_tokens


@pytest.mark.parametrize("dtype", list(TokenDType))
@pytest.mark.parametrize("seq_len", [1, 5, 39])
def test_windows_follow_the_concatenated_files(tmp_path, dtype, seq_len):
    """Oracle: ``np.fromfile`` of all files, joined; windows longer than a file cross several."""
    for number, count in enumerate([17, 1, 3, 20]):
        write_tokens(tmp_path / f"part{number}.bin", count, dtype.value, seed=number)
    stream = np.concatenate([np.fromfile(tmp_path / f"part{number}.bin", dtype.value) for number in range(4)])
    config = BinConfig([f"{tmp_path}/part0.bin", f"{tmp_path}/part[1-9].bin"], dtype)
    config.validate(seq_len, 70_000)
    dataset = config.build(seq_len, 70_000, seed=0)
    assert_windows(dataset.train, stream, seq_len)
    assert not config.has_eval and dataset.eval is None and not hasattr(dataset, "decode")


@pytest.mark.parametrize("held_out", ["fraction", "files"])
def test_held_out_part_is_the_tail_or_separate_files(tmp_path, held_out):
    """Oracle: slices of ``np.fromfile``."""
    train = write_tokens(tmp_path / "train.bin", 100)
    separate = write_tokens(tmp_path / "val.bin", 30, seed=1)
    settings = {"fraction": {"eval_fraction": 0.3}, "files": {"eval_files": [f"{tmp_path}/val.bin"]}}[held_out]
    config = BinConfig([f"{tmp_path}/train.bin"], **settings)
    dataset = config.build(10, 70_000, seed=0)
    assert config.has_eval
    assert_windows(dataset.train, train[:70] if held_out == "fraction" else train, 10)
    assert_windows(dataset.eval, train[70:] if held_out == "fraction" else separate, 10)


def test_labels_can_end_at_document_boundaries(tmp_path):
    """Oracle: the tokens; the fingerprint differs, so checkpoints of other labels are refused."""
    end = 3
    np.random.default_rng(0).integers(0, 8, 200).astype("uint16").tofile(tmp_path / "train.bin")
    config = BinConfig([f"{tmp_path}/train.bin"], document_end=end, eval_fraction=0.2)
    plain, dataset = config.build(10, 8, seed=0), config.build(10, 8, seed=0)
    dataset.end_labels_with_documents()
    assert dataset.fingerprint != plain.fingerprint and len(dataset.train) == len(plain.train)
    for before, after in ((plain.train, dataset.train), (plain.eval, dataset.eval)):
        for (tokens_T, labels_T), (same_T, masked_T) in zip(before, after, strict=True):
            np.testing.assert_array_equal(same_T, tokens_T)
            np.testing.assert_array_equal(masked_T, np.where(tokens_T == end, IGNORE_INDEX, labels_T))


def test_fingerprint_depends_on_everything_that_determines_the_samples(tmp_path):
    """Oracle: one change at a time, including the dtype; held-out files do not change the fingerprint."""
    paths = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    for number, path in enumerate(paths):
        write_tokens(Path(path), 100, seed=number)
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
    assert not samples[6250][0].any() and not samples[6252][0].any()
    with pytest.raises(ConfigError, match=r"b\.bin\] has token 51 at position 50000, outside model\.vocab_size=50;"):
        samples[6251]
