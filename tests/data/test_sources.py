"""Token files, text and synthetic data, compared with ``np.fromfile``, the joined files and
formulas."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX
from fsdptoys.data.bin import BinConfig, TokenDType
from fsdptoys.data.byte_text import TextConfig, decode_bytes, encode_bytes
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.loss import objective
from tests.data.samples import assert_windows


def test_ignore_index_equals_that_of_the_loss():
    """Oracle: the constant of the loss, which data does not import."""
    assert IGNORE_INDEX == objective.IGNORE_INDEX


def write_tokens(
    path: Path, count: int, dtype: str = "uint16", seed: int = 0
) -> np.ndarray:
    limit = min(70_000, np.iinfo(dtype).max + 1)
    tokens = np.random.default_rng(seed).integers(0, limit, count).astype(dtype)
    tokens.tofile(path)
    return tokens


@pytest.mark.parametrize("dtype", list(TokenDType))
@pytest.mark.parametrize("seq_len", [1, 5, 39])
def test_windows_follow_the_concatenated_files(tmp_path, dtype, seq_len):
    """Oracle: ``np.fromfile`` of all files, joined; windows longer than a file cross several."""
    for number, count in enumerate([17, 1, 3, 20]):
        write_tokens(tmp_path / f"part{number}.bin", count, dtype.value, seed=number)
    stream = np.concatenate(
        [
            np.fromfile(tmp_path / f"part{number}.bin", dtype.value)
            for number in range(4)
        ]
    )
    config = BinConfig([f"{tmp_path}/part0.bin", f"{tmp_path}/part[1-9].bin"], dtype)
    config.validate(seq_len, 70_000)
    dataset = config.build(seq_len, 70_000, seed=0)
    assert_windows(dataset.train, stream, seq_len)
    assert (
        not config.has_eval and dataset.eval is None and not hasattr(dataset, "decode")
    )


@pytest.mark.parametrize("held_out", ["fraction", "files"])
def test_held_out_part_is_the_tail_or_separate_files(tmp_path, held_out):
    """Oracle: slices of ``np.fromfile``."""
    train = write_tokens(tmp_path / "train.bin", 100)
    separate = write_tokens(tmp_path / "val.bin", 30, seed=1)
    settings = {
        "fraction": {"eval_fraction": 0.3},
        "files": {"eval_files": [f"{tmp_path}/val.bin"]},
    }[held_out]
    config = BinConfig([f"{tmp_path}/train.bin"], **settings)
    dataset = config.build(10, 70_000, seed=0)
    assert config.has_eval
    assert_windows(dataset.train, train[:70] if held_out == "fraction" else train, 10)
    assert_windows(dataset.eval, train[70:] if held_out == "fraction" else separate, 10)


def test_labels_can_end_at_document_boundaries(tmp_path):
    """Oracle: the tokens; the fingerprint differs, so checkpoints of other labels are refused."""
    end = 3
    np.random.default_rng(0).integers(0, 8, 200).astype("uint16").tofile(
        tmp_path / "train.bin"
    )
    config = BinConfig([f"{tmp_path}/train.bin"], document_end=end, eval_fraction=0.2)
    plain = config.build(10, 8, seed=0)
    dataset = config.build(10, 8, seed=0)
    dataset.end_labels_with_documents()
    assert dataset.fingerprint != plain.fingerprint and len(dataset.train) == len(
        plain.train
    )
    for before, after in ((plain.train, dataset.train), (plain.eval, dataset.eval)):
        for (tokens_T, labels_T), (same_T, masked_T) in zip(before, after, strict=True):
            np.testing.assert_array_equal(same_T, tokens_T)
            np.testing.assert_array_equal(
                masked_T, np.where(tokens_T == end, IGNORE_INDEX, labels_T)
            )


def test_out_of_range_token_is_reported_when_read(tmp_path, monkeypatch):
    """Oracle: the expected message, with the position in the file rather than in the window or the
    stream."""
    monkeypatch.setattr("fsdptoys.data.token_stream.HEAD_BYTES", 64)
    np.zeros(10, dtype="uint16").tofile(tmp_path / "a.bin")
    tokens = np.zeros(100_000, dtype="uint16")
    tokens[50_000] = 51
    tokens.tofile(tmp_path / "b.bin")
    config = BinConfig([f"{tmp_path}/a.bin", f"{tmp_path}/b.bin"])
    config.validate(8, 50)
    samples = config.build(8, 50, 0).train
    assert not samples[6250][0].any() and not samples[6252][0].any()
    with pytest.raises(
        ConfigError,
        match=r"b\.bin\] has token 51 at position 50000, outside model\.vocab_size=50;",
    ):
        samples[6251]


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
    ("seq_len", "eval_fraction"), [(1, 0.0), (297, 0.0), (1, 0.5), (7, 0.5), (100, 0.5)]
)
def test_windows_follow_the_joined_files(tmp_path, seq_len, eval_fraction):
    """Oracle: slices of the files joined by zero bytes in the order of their names' hashes."""
    names = [
        name for name, content in DOCUMENTS.items() if name.endswith(".txt") and content
    ]
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
    """Oracle: a copy elsewhere, a relative glob, and a file that is named twice."""
    corpus = write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(write_corpus(tmp_path / "copy"))
    datasets = [
        TextConfig(patterns).build(8, 256, 0)
        for patterns in ([f"{corpus}/**/*.txt"], ["**/*.txt", "d.txt"])
    ]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    np.testing.assert_array_equal(datasets[0].train[3], datasets[1].train[3])


def test_existing_path_with_glob_characters_is_read_literally(tmp_path):
    """Oracle: the file's content."""
    (tmp_path / "a[1].txt").write_bytes(b"0123456789")
    dataset = TextConfig([f"{tmp_path}/a[1].txt"], eval_fraction=0.0).build(9, 256, 0)
    assert decode_bytes(dataset.train[0][0]) == "012345678"


def test_unigram_entropy_covers_only_the_training_part(tmp_path, monkeypatch):
    """Oracle: the formula over a byte count by hand; a second value after cutting the counted part
    to 4 bytes."""
    (tmp_path / "a.txt").write_bytes(b"aaaabbcd" + b"zzzz")
    config = TextConfig([f"{tmp_path}/a.txt"], eval_fraction=1 / 3)
    dataset = config.build(2, 256, 0)
    assert dataset.unigram_entropy_nats == pytest.approx(1.75 * np.log(2))
    assert dataset.conditional_entropy_nats is None
    monkeypatch.setattr("fsdptoys.data.token_windows.CHUNK_TOKENS", 3)
    assert config.build(2, 256, 0).unigram_entropy_nats == pytest.approx(
        1.75 * np.log(2)
    )
    monkeypatch.setattr("fsdptoys.data.token_windows.ENTROPY_BYTES", 4)
    assert config.build(2, 256, 0).unigram_entropy_nats == 0


def test_text_round_trips_through_bytes():
    """Oracle: Python's UTF-8; other ids and bytes become U+FFFD."""
    tokens_T = encode_bytes("def \u00e9\u20ac")
    assert tokens_T.dtype == np.int64 and tokens_T.tolist() == list(
        "def \u00e9\u20ac".encode()
    )
    assert decode_bytes(tokens_T) == "def \u00e9\u20ac"
    assert decode_bytes([104, 300, 105, -1, 0xC3]) == "h\ufffdi\ufffd\ufffd"
    assert encode_bytes("").shape == (0,) and decode_bytes([]) == ""


def test_stdlib_is_the_source_of_python_without_tests():
    """Oracle: the directory of the running interpreter."""
    config = TextConfig()
    config.validate(512, 256)
    dataset = config.build(512, 256, 0)
    names = {file.source.name for file in dataset.train.stream.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    total = len(dataset.train.stream)
    assert total > 5_000_000 and dataset.train.stop + int(total * 0.05) == total
    assert len(dataset.eval) == (int(total * 0.05) - 1) // 512


def test_file_removed_during_a_run_is_reported(tmp_path):
    """Oracle: the expected message; ``test_loader`` has that for a shortened file."""
    dataset = TextConfig([f"{write_corpus(tmp_path)}/d.txt"]).build(8, 256, 0)
    (tmp_path / "d.txt").unlink()
    with pytest.raises(
        ConfigError,
        match=r"d\.txt\] can no longer be read \(No such file or directory\); restore",
    ):
        dataset.train[20]


SEQ_LEN = 64
VOCAB = 50


def entropy_nats(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def test_samples_depend_only_on_split_seed_and_index():
    """Oracle: a second data set of the same seed; samples of two splits and two seeds differ."""
    config = SyntheticConfig(eval_samples=4)
    datasets = [config.build(SEQ_LEN, VOCAB, seed) for seed in (3, 4, 3)]
    for number in (3, 0):
        np.testing.assert_array_equal(
            datasets[2].train[number], datasets[0].train[number]
        )
    samples = {
        split[number][0].tobytes()
        for dataset in datasets[:2]
        for split in (dataset.train, dataset.eval)
        for number in range(4)
    }
    assert (
        len(samples) == 16 and len(list(datasets[0].eval)) == len(datasets[0].eval) == 4
    )
    assert SyntheticConfig(eval_samples=0).build(8, 32, 0).eval is None


def test_samples_are_stable_across_versions():
    """Oracle: recorded numbers; NumPy guarantees its raw Philox bits and SeedSequence across
    versions."""
    tokens_T, labels_T = SyntheticConfig(branching=8).build(8, 256, seed=0).train[0]
    assert tokens_T.tolist() == [239, 247, 254, 5, 9, 10, 14, 19]
    assert labels_T[:-1].tolist() == tokens_T[1:].tolist()


@pytest.mark.parametrize("branching", [1, 8, VOCAB])
def test_entropies_follow_the_formulas(branching):
    """Oracle: counts over 2,000 samples; log(branching) for pairs, log(vocab) for single tokens,
    bias under 1%."""
    dataset = SyntheticConfig(branching=branching).build(SEQ_LEN, VOCAB, seed=1)
    pairs = np.zeros((VOCAB, VOCAB))
    for index in range(2000):
        tokens_T, labels_T = dataset.train[index]
        np.add.at(pairs, (tokens_T, labels_T), 1)
    assert dataset.conditional_entropy_nats == math.log(branching)
    assert dataset.unigram_entropy_nats == math.log(VOCAB)
    assert entropy_nats(pairs.ravel()) - entropy_nats(pairs.sum(1)) == pytest.approx(
        math.log(branching), abs=0.01
    )
    assert entropy_nats(pairs.sum(0)) == pytest.approx(math.log(VOCAB), abs=0.01)
    assert (pairs > 0).sum(1).max() <= branching


def test_ragged_sequences_end_with_ignored_labels_and_padding():
    """Oracle: the same source without ``ragged``, cut where the labels stop; ends cover 1 to T
    uniformly."""
    ragged = SyntheticConfig(ragged=True).build(SEQ_LEN, VOCAB, seed=2).train
    whole = SyntheticConfig().build(SEQ_LEN, VOCAB, seed=2).train
    ends = []
    for index in range(2000):
        tokens_T, labels_T = ragged[index]
        whole_tokens_T, whole_labels_T = whole[index]
        valid = int((labels_T != IGNORE_INDEX).sum())
        ends.append(valid)
        np.testing.assert_array_equal(labels_T[:valid], whole_labels_T[:valid])
        np.testing.assert_array_equal(
            tokens_T[: valid + 1], whole_tokens_T[: valid + 1]
        )
        assert (labels_T[valid:] == IGNORE_INDEX).all() and (
            tokens_T[valid + 1 :] == 0
        ).all()
    assert (min(ends), max(ends)) == (1, SEQ_LEN)
    assert np.mean(ends) == pytest.approx((1 + SEQ_LEN) / 2, rel=0.05)


def synthetic(
    *, seq_len: int = 8, vocab_size: int = 32, seed: int = 0, **settings
) -> str:
    return SyntheticConfig(**settings).build(seq_len, vocab_size, seed).fingerprint


def binary(**settings) -> str:
    return (
        BinConfig(**{"files": ["x/a.bin", "x/b.bin"]} | settings)
        .build(4, 2**32, 0)
        .fingerprint
    )


def text(folder: str = "x", seq_len: int = 8, seed: int = 0, **settings) -> str:
    return (
        TextConfig([f"{folder}/**/*.txt"], **settings)
        .build(seq_len, 256, seed)
        .fingerprint
    )


FOLDERS = {
    "other content": {"a.txt": b"First document"},
    "other size": {"a.txt": b"first document!"},
    "other name": {"a.txt": b"", "z.txt": DOCUMENTS["a.txt"]},
}
CHANGES = [
    (synthetic, [{"seq_len": 9}, {"vocab_size": 33}, {"seed": 1}, {"branching": 4}]),
    (synthetic, [{"ragged": True}]),
    (binary, [{"files": ["x/b.bin", "x/a.bin"]}, {"files": ["x/a.bin"]}]),
    (binary, [{"eval_fraction": 0.5}, {"dtype": TokenDType.uint32}]),
    (text, [{"seq_len": 9}, {"seed": 1}, {"eval_fraction": 0.25}]),
    (text, [{"folder": name} for name in FOLDERS]),
]


def test_fingerprint_depends_on_everything_that_determines_the_samples(
    tmp_path, monkeypatch
):
    """Oracle: one change at a time; held-out files, and a second reading of the same files, change
    nothing."""
    monkeypatch.chdir(tmp_path)
    for folder, changed in {"x": {}, **FOLDERS}.items():
        write_corpus(Path(folder), DOCUMENTS | changed)
    for seed, name in enumerate("abc"):
        write_tokens(Path(f"x/{name}.bin"), 100, seed=seed)
    for fingerprint, changes in CHANGES:
        for settings in changes:
            assert fingerprint() == fingerprint() != fingerprint(**settings), settings
    assert binary(eval_files=["x/c.bin"]) == binary()
