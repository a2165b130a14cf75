"""Prepared folders, alone and mixed, compared with the files that hold their tokens."""

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX, BatchStream, PreparedConfig, eval_batches
from fsdptoys.data.mixture import BLOCK, MixedHeldOut, MixedSamples, Pattern
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.errors import ConfigError
from tests.data.test_prepare import documents, request, write_lines
from tests.data.test_sampler import SEQ_LEN, NumberedSamples, take_numbers
from tests.data.windows import assert_windows


def make(folder: Path, count: int = 150, seed: int = 0, **changes) -> str:
    lines = write_lines(folder.with_suffix(".jsonl"), [f"{folder.name} {text}" for text in documents(count, seed)])
    prepare_folder(request(folder, lines, **({"shard_tokens": 1000, "eval_fraction": 0.2} | changes)))
    return str(folder)


def tokens_of(folder: str, split: str) -> np.ndarray:
    shards = json.loads((Path(folder) / "index.json").read_text())["shards"]
    names = [shard["name"] for shard in shards if shard["split"] == split]
    parts = [np.fromfile(Path(folder) / f"{name}.bin", "<u2") for name in names]
    return np.concatenate(parts).astype(np.int64)


@pytest.mark.parametrize("seq_len", [1, 16, 1500])
def test_windows_follow_the_concatenated_shards_of_a_split(tmp_path, monkeypatch, seq_len):
    """Oracle: ``np.fromfile`` of the shards, joined, with fewer of them mapped at a time than a window crosses."""
    monkeypatch.setattr("fsdptoys.data.prepared.MOST_MAPS", 2)
    folder = make(tmp_path / "out")
    config = PreparedConfig(folder=folder)
    config.validate(seq_len, 256)
    dataset = config.build(seq_len, 256, seed=0)
    assert dataset.document_end == 0 and config.has_eval
    for samples, split in ((dataset.train, "train"), (dataset.eval, "eval")):
        assert_windows(samples, tokens_of(folder, split), seq_len, stride=max(1, len(samples) // 50))
        assert len(samples.stream._maps) <= 2


def test_fingerprint_depends_only_on_contents_and_settings(tmp_path):
    """Oracle: one change at a time; a copy in another folder is the same data."""
    first, other = make(tmp_path / "out"), make(tmp_path / "other")
    copy = shutil.copytree(first, tmp_path / "elsewhere")

    def fingerprint(seq_len: int = 8, seed: int = 0, **settings) -> str:
        return PreparedConfig(**settings).build(seq_len, 256, seed).fingerprint

    assert fingerprint(folder=first) == fingerprint(folder=str(copy))
    mixed = {"sources": [first, other], "weights": [3.0, 1.0]}
    prints = [
        fingerprint(folder=first),
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
    first, other = make(tmp_path / "first"), make(tmp_path / "other")
    tokens = [tokens_of(folder, "train") for folder in (first, other)]
    shares = [np.bincount(ids, minlength=256) / len(ids) for ids in tokens]

    def entropy(shares_V: np.ndarray) -> float:
        return float(-(shares_V[shares_V > 0] * np.log(shares_V[shares_V > 0])).sum())

    assert PreparedConfig(folder=first).build(8, 256, 0).unigram_entropy_nats == pytest.approx(entropy(shares[0]))
    mixed = PreparedConfig(sources=[first, other], weights=[3.0, 1.0]).build(8, 256, 0)
    assert mixed.unigram_entropy_nats == pytest.approx(entropy(0.75 * shares[0] + 0.25 * shares[1]))


class Marked(NumberedSamples):
    """Samples numbered from 1000 times the source's number."""

    def __init__(self, source: int, count: int) -> None:
        super().__init__(count)
        self.source = source

    def __getitem__(self, index: int):
        tokens, labels = super().__getitem__(index)
        return tokens + 1000 * self.source, labels


def mixture(weights, sizes=(40, 7, 100), seed: int = 0) -> MixedSamples:
    return MixedSamples([Marked(number, size) for number, size in enumerate(sizes[: len(weights)])], weights, seed)


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
    """Oracle: counting in blocks of the smallest size that has them, or of 10,000 for shares of no smaller one."""
    samples = mixture(weights)
    size = sum(counts)
    assert list(samples.pattern.counts) == counts and size <= BLOCK
    for block in range(3):
        owners = Counter(samples.locate(place)[0] for place in range(block * size, (block + 1) * size))
        assert [owners[number] for number in range(len(weights))] == counts


def test_blocks_are_rotated_randomly():
    """Oracle: the ten rotations of a block of 7 and 3, all of them in the first hundred blocks."""
    samples = mixture([0.7, 0.3])
    blocks = {tuple(samples.locate(10 * block + spot)[0] for spot in range(10)) for block in range(100)}
    assert len(blocks) == 10
    (one, *_) = blocks
    assert blocks == {one[first:] + one[:first] for first in range(10)}


def test_every_source_has_its_own_epochs():
    """Oracle: sorted numbers of each source's epochs, of 40 and of 7 samples, in orders of their own; two seeds."""
    samples = mixture([3, 1])
    taken: dict[int, list[int]] = {0: [], 1: []}
    for place in range(400):
        owner, number = samples.locate(place)
        taken[owner].append(number)
    for owner, size in ((0, 40), (1, 7)):
        epochs = [taken[owner][start : start + size] for start in range(0, len(taken[owner]) - size + 1, size)]
        assert len(epochs) >= 7 and all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert [mixture([3, 1], seed=1).locate(place) for place in range(400)] != [samples.locate(p) for p in range(400)]


def test_streams_of_a_mixture_take_its_samples_in_order():
    """Oracle: the owner and number of each place; tests/data/test_sampler.py distributes such samples over ranks."""
    samples = mixture([3, 1])
    places = [samples.locate(place) for place in range(72)]
    assert samples.endless
    numbers = take_numbers(BatchStream(samples, 12, 1, range(1), 1, 0), 6)
    assert numbers == [1000 * owner + number for owner, number in places]


@pytest.mark.parametrize(
    ("weights", "sizes", "length"), [([3, 1], (7, 7), 9), ([1, 1], (4, 9), 8), ([2, 1], (1, 5), 2)]
)
def test_held_out_samples_keep_the_proportions_until_a_source_ends(weights, sizes, length):
    """Oracle: each source's samples in their order; every start of the list has its share to within one sample."""
    samples = MixedHeldOut([Marked(number, size) for number, size in enumerate(sizes)], weights)
    numbers = [int(samples[index][0][0]) for index in range(len(samples))]
    assert len(numbers) == length
    for owner in (0, 1):
        own = [number - 1000 * owner for number in numbers if number // 1000 == owner]
        assert own == list(range(len(own)))
    for stop in range(1, length + 1):
        share = sum(number < 1000 for number in numbers[:stop])
        assert abs(share - stop * weights[0] / sum(weights)) < 1
    (tokens_BT, labels_BT), *_ = eval_batches(samples, 16, 1, 0, 1)
    assert tokens_BT.shape == (16, SEQ_LEN) and int((labels_BT != IGNORE_INDEX).sum()) == length * SEQ_LEN


def test_sources_share_the_limit_on_memory_maps_which_workers_do_not_receive(tmp_path, monkeypatch):
    """Oracle: the limit of all together, when every sample of both has been read; a pickled mixture's own samples."""
    monkeypatch.setattr("fsdptoys.data.prepared.MOST_MAPS", 4)
    train = PreparedConfig(sources=[make(tmp_path / "a"), make(tmp_path / "b")]).build(64, 256, 0).train
    for source in train.sources:
        assert all(source[number][0].shape == (64,) for number in range(len(source)))
        assert len(source.stream.files) > 10
    assert [len(source.stream._maps) for source in train.sources] == [2, 2]
    sent = pickle.loads(pickle.dumps(train))
    assert [source.stream._maps for source in sent.sources] == [None, None]
    for place in range(20):
        np.testing.assert_array_equal(sent[place], train[place])


def test_weights_default_to_the_source_sizes(tmp_path):
    """Oracle: the numbers of training samples."""
    folders = [make(tmp_path / "first"), make(tmp_path / "other", count=40)]
    train = PreparedConfig(sources=folders).build(32, 256, 0).train
    sizes = [len(source) for source in train.sources]
    assert sizes[0] > 3 * sizes[1]
    shares = [count / len(train.pattern) for count in train.pattern.counts]
    assert shares == pytest.approx([size / sum(sizes) for size in sizes], abs=1 / BLOCK)


def test_samples_of_a_source_are_spread_evenly_over_a_block():
    """Oracle: any start of the pattern has each source's share to within one place."""
    pattern = Pattern([5, 2, 1])
    for stop in range(1, 9):
        for owner, count in enumerate((5, 2, 1)):
            assert abs(pattern.owners[:stop].count(owner) - stop * count / 8) < 1.01


def test_damaged_shard_is_reported_when_read(tmp_path):
    """Oracle: the expected message of the reader of token files."""
    folder = make(tmp_path / "out", eval_fraction=0.0)
    tokens = np.fromfile(f"{folder}/shard-00000.bin", "<u2")
    tokens[20] = 999
    tokens.tofile(f"{folder}/shard-00000.bin")
    samples = PreparedConfig(folder=folder).build(16, 256, 0).train
    samples[0]
    with pytest.raises(
        ConfigError, match=r"shard-00000\.bin\] has token 999 at position 20, outside model\.vocab_size"
    ):
        samples[1]
