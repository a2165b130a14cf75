"""Prepared folders, alone, mixed and packed, compared with the files that hold their tokens."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import (
    IGNORE_INDEX,
    eval_batches,
    packing,
    read_index,
)
from fsdptoys.data.mixture import BLOCK, MixedHeldOut, MixedSamples
from fsdptoys.data.packing import Packing, best_fit, cut
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from tests.data.samples import SEQ_LEN, NumberedSamples, assert_windows
from tests.harness.prepared_data import make, read_split
from tests.harness.ranks import run_ranks


def tokens_of(folder: str, split: str) -> np.ndarray:
    shards = json.loads((Path(folder) / "index.json").read_text())["shards"]
    names = [shard["name"] for shard in shards if shard["split"] == split]
    parts = [np.fromfile(Path(folder) / f"{name}.bin", "<u2") for name in names]
    return np.concatenate(parts).astype(np.int64)


@pytest.mark.parametrize("seq_len", [1, 16, 1500])
def test_windows_follow_the_concatenated_shards_of_a_split(tmp_path, seq_len):
    """Oracle: ``np.fromfile`` of the shards, joined."""
    folder = make(tmp_path / "out")
    config = PreparedConfig(folder=folder)
    config.validate(seq_len, 256)
    dataset = config.build(seq_len, 256, seed=0)
    assert dataset.document_end == 0 and config.has_eval
    for samples, split in ((dataset.train, "train"), (dataset.eval, "eval")):
        assert_windows(
            samples,
            tokens_of(folder, split),
            seq_len,
            stride=max(1, len(samples) // 50),
        )


def test_fingerprint_depends_only_on_contents_and_settings(tmp_path):
    """Oracle: one change at a time; a copy in another folder is the same data."""
    first = make(tmp_path / "out")
    other = make(tmp_path / "other")
    copy = shutil.copytree(first, tmp_path / "elsewhere")

    def fingerprint(seq_len: int = 8, seed: int = 0, **settings) -> str:
        return PreparedConfig(**settings).build(seq_len, 256, seed).fingerprint

    assert fingerprint(folder=first) == fingerprint(folder=str(copy))
    mixed = {"sources": [first, other], "weights": [3.0, 1.0]}
    packed = {"packing": Packing.best_fit, "cache": str(tmp_path / "cache")}
    prints = [
        fingerprint(folder=first),
        fingerprint(folder=first, **packed),
        fingerprint(folder=first, seq_len=9),
        fingerprint(folder=first, seed=1),
        fingerprint(folder=other),
        fingerprint(**mixed),
        fingerprint(**mixed | {"weights": [1.0, 3.0]}),
        fingerprint(**mixed | {"sources": [other, first]}),
        fingerprint(**mixed, seed=1),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(**mixed | {"weights": [6.0, 2.0]}) == fingerprint(**mixed)


def test_unigram_entropy_matches_the_mixture(tmp_path):
    """Oracle: the formula over counts by hand, weighed by the sources' shares."""
    first = make(tmp_path / "first")
    other = make(tmp_path / "other")
    tokens = [tokens_of(folder, "train") for folder in (first, other)]
    shares = [np.bincount(ids, minlength=256) / len(ids) for ids in tokens]

    def entropy(shares_V: np.ndarray) -> float:
        return float(-(shares_V[shares_V > 0] * np.log(shares_V[shares_V > 0])).sum())

    mixed = PreparedConfig(sources=[first, other], weights=[3.0, 1.0]).build(8, 256, 0)
    assert mixed.unigram_entropy_nats == pytest.approx(
        entropy(0.75 * shares[0] + 0.25 * shares[1])
    )


def numbered(*counts: int) -> list[NumberedSamples]:
    """Samples numbered from 1000 times the source's number."""
    return [
        NumberedSamples(count, first=1000 * source)
        for source, count in enumerate(counts)
    ]


def mixture(weights, seed: int = 0) -> MixedSamples:
    return MixedSamples(numbered(40, 7, 100)[: len(weights)], weights, seed)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([3, 1], [3, 1]),
        ([0.7, 0.3], [7, 3]),
        ([1, 1, 1], [1, 1, 1]),
        ([0.5, 0.25, 0.25], [2, 1, 1]),
        ([0.6, 0.2999, 0.1001], [6000, 2999, 1001]),
        ([1, np.pi], [2415, 7585]),
        ([1e6, 2e6], [1, 2]),
    ],
)
def test_every_block_has_the_exact_proportions(weights, counts):
    """Oracle: counts in blocks of the smallest size that has them, or of 10,000; each start has its
    share."""
    samples = mixture(weights)
    size = sum(counts)
    assert samples.counts == counts and size <= BLOCK
    for block in range(3):
        owners = Counter(
            samples.locate(position)[0]
            for position in range(block * size, (block + 1) * size)
        )
        assert [owners[number] for number in range(len(weights))] == counts
    owners_N = samples.owners
    for number, count in enumerate(counts):
        assert np.all(
            abs(np.cumsum(owners_N == number) - np.arange(1, size + 1) * count / size)
            < 1.01
        )


def test_blocks_are_rotated_randomly():
    """Oracle: the ten rotations of a block of 7 and 3, all of them in the first hundred blocks."""
    samples = mixture([0.7, 0.3])
    blocks = {
        tuple(samples.locate(10 * block + spot)[0] for spot in range(10))
        for block in range(100)
    }
    assert len(blocks) == 10
    (one, *_) = blocks
    assert blocks == {one[first:] + one[:first] for first in range(10)}


def test_every_source_has_its_own_epochs():
    """Oracle: sorted numbers of each source's epochs, of 40 and of 7 samples, in orders of their
    own; two seeds."""
    samples = mixture([3, 1])
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for position in range(400):
        owner, number = samples.locate(position)
        numbers[owner].append(number)
    for owner, size in ((0, 40), (1, 7)):
        epochs = [
            numbers[owner][start : start + size]
            for start in range(0, len(numbers[owner]) - size + 1, size)
        ]
        assert len(epochs) >= 7 and all(
            sorted(epoch) == list(range(size)) for epoch in epochs
        )
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert [mixture([3, 1], seed=1).locate(position) for position in range(400)] != [
        samples.locate(p) for p in range(400)
    ]


@pytest.mark.parametrize(
    ("weights", "sizes", "length"),
    [([3, 1], (7, 7), 9), ([1, 1], (4, 9), 8), ([2, 1], (1, 5), 2)],
)
def test_held_out_samples_keep_the_proportions_until_a_source_ends(
    weights, sizes, length
):
    """Oracle: each source's samples in their order; every start of the list has its share to within
    one sample."""
    samples = MixedHeldOut(numbered(*sizes), weights)
    numbers = [int(samples[index][0][0]) for index in range(len(samples))]
    assert len(numbers) == length
    for owner in (0, 1):
        own = [number - 1000 * owner for number in numbers if number // 1000 == owner]
        assert own == list(range(len(own)))
    for stop in range(1, length + 1):
        share = sum(number < 1000 for number in numbers[:stop])
        assert abs(share - stop * weights[0] / sum(weights)) < 1
    (tokens_BT, labels_BT), *_ = eval_batches(samples, 16, 1, 0, 1)
    assert (
        tokens_BT.shape == (16, SEQ_LEN)
        and int((labels_BT != IGNORE_INDEX).sum()) == length * SEQ_LEN
    )


def test_weights_default_to_the_source_sizes(tmp_path):
    """Oracle: the numbers of training samples."""
    folders = [make(tmp_path / "first"), make(tmp_path / "other", count=40)]
    train = PreparedConfig(sources=folders).build(32, 256, 0).train
    sizes = [len(source) for source in train.sources]
    assert sizes[0] > 3 * sizes[1]
    shares = [count / len(train.owners) for count in train.counts]
    assert shares == pytest.approx([size / sum(sizes) for size in sizes], abs=1 / BLOCK)


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put the longest first, each into the fullest row with enough space, by scanning all rows."""
    rows: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        rooms = [capacity - sum(lengths[other] for other in row) for row in rows]
        fitting = [
            number for number, room in enumerate(rooms) if room >= lengths[piece]
        ]
        if fitting:
            rows[min(fitting, key=rooms.__getitem__)].append(piece)
        else:
            rows.append([piece])
    return rows


@pytest.mark.parametrize("capacity", [5, 33, 200])
@pytest.mark.parametrize("seed", range(3))
def test_best_fit_fills_rows_like_the_reference_implementation(capacity, seed):
    """Oracle: row lengths of the simple best fit, which no tie affects; each piece is in one row,
    within capacity."""
    lengths = np.random.default_rng(seed).integers(2, capacity + 1, 150)
    rows = best_fit(lengths, capacity)
    assert sorted(piece for row in rows for piece in row) == list(range(150))
    assert all(row == sorted(row) and lengths[row].sum() <= capacity for row in rows)
    filled = sorted(int(lengths[row].sum()) for row in rows)
    assert filled == sorted(
        int(lengths[row].sum()) for row in plain_best_fit(lengths.tolist(), capacity)
    )


@pytest.mark.parametrize("seq_len", [1, 4, 7])
def test_cut_documents_predict_every_token_once(seq_len):
    """Oracle: the labels of all pieces, which are all ids of a document but its first."""
    stops = np.cumsum(np.arange(2, 40))
    starts, lengths, are_cut = cut(0, stops, seq_len)
    assert ((lengths >= 2) & (lengths <= seq_len + 1)).all()
    labels = [
        label
        for start, length in zip(starts, lengths, strict=True)
        for label in range(start + 1, start + length)
    ]
    firsts = {0, *stops.tolist()}
    assert labels == [label for label in range(stops[-1]) if label not in firsts]
    assert sorted(lengths[~are_cut]) == list(range(2, seq_len + 2))


def config(folder: str, cache: Path, **changes) -> PreparedConfig:
    return PreparedConfig(
        **{"folder": folder, "packing": Packing.best_fit, "cache": str(cache)} | changes
    )


@pytest.mark.parametrize("group", [16, 2**16])
def test_rows_hold_complete_documents_and_ignored_padding(tmp_path, monkeypatch, group):
    """Oracle: the folder's documents, each once, over several shards and groups; the rest is
    padding."""
    monkeypatch.setattr(packing, "GROUP", group)
    folder = make(tmp_path / "out")
    seq_len = 700
    dataset = config(folder, tmp_path / "cache").build(seq_len, 256, 0)
    for samples, split in ((dataset.train, "train"), (dataset.eval, "eval")):
        documents = []
        for index in range(len(samples)):
            tokens_T, labels_T = samples[index]
            assert tokens_T.shape == labels_T.shape == (seq_len,)
            valid = int((labels_T != IGNORE_INDEX).sum())
            assert (labels_T[:valid] != IGNORE_INDEX).all() and labels_T[valid - 1] == 0
            assert (tokens_T[valid:] == 0).all()
            np.testing.assert_array_equal(tokens_T[1:valid], labels_T[: valid - 1])
            ids = np.append(tokens_T[:valid], labels_T[valid - 1])
            documents += ids.astype(np.uint8).tobytes().split(b"\0")[:-1]
        assert sorted(documents) == sorted(read_split(Path(folder), split))
        lengths = [len(document) + 1 for document in documents]
        assert group == 16 or len(samples) == len(plain_best_fit(lengths, seq_len + 1))


def test_documents_longer_than_a_row_are_complete(tmp_path):
    """Oracle: one label for each id of the folder except the first of each document."""
    folder = make(tmp_path / "out", eval_fraction=0.0)
    samples = config(folder, tmp_path / "cache").build(50, 256, 0).train
    index = read_index(folder, "")
    labels = [samples[number][1] for number in range(len(samples))]
    joined = sum(len(samples.rows.row(number)) - 1 for number in range(len(samples)))
    valid = sum(int((labels_T != IGNORE_INDEX).sum()) for labels_T in labels)
    assert valid - joined == index.tokens("train") - index.documents("train")


def build(prepared: PreparedConfig) -> int:
    return len(prepared.build(64, 256, 0).train)


def test_packing_plan_is_built_once_per_sequence_length(tmp_path, monkeypatch):
    """Oracle: a log of the planning processes, for concurrent and for later ranks."""
    write = packing._write_rows
    log = tmp_path / "log"

    def logged(*args):
        with log.open("a") as opened:
            print(os.getpid(), file=opened)
        write(*args)

    monkeypatch.setattr(packing, "_write_rows", logged)
    prepared = config(make(tmp_path / "out", eval_fraction=0.0), tmp_path / "cache")
    assert len(set(run_ranks(3, build, prepared))) == 1
    prepared.prepare(64, 256)
    assert len(log.read_text().splitlines()) == 1
    prepared.prepare(65, 256)
    assert (
        len(log.read_text().splitlines()) == 2
        and len(list((tmp_path / "cache").iterdir())) == 2
    )


def test_mixed_data_can_be_packed(tmp_path):
    """Oracle: rows of the folders without mixing."""
    folders = [
        make(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "other"))
    ]
    mixed = (
        config(None, tmp_path / "cache", sources=folders, weights=[1.0, 1.0])
        .build(64, 256, 0)
        .train
    )
    assert isinstance(mixed, MixedSamples)
    owner, number = mixed.locate(5)
    alone = config(folders[owner], tmp_path / "cache").build(64, 256, 0).train
    np.testing.assert_array_equal(mixed[5][1], alone[number][1])


def test_unwritable_packing_cache_is_reported(tmp_path):
    """Oracle: the expected message."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        ConfigError,
        match=r"^data\.packing=best_fit cannot keep its rows in .*; set data\.cache to a",
    ):
        config(make(tmp_path / "out"), tmp_path / "cache").prepare(64, 256)
