"""The Markov source, compared with formulas."""

import math

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX, SyntheticConfig

SEQ_LEN, VOCAB = 64, 50


def entropy_nats(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("part", ["train", "eval"])
def test_sample_depends_only_on_seed_and_index(part):
    """Oracle: a second data set of the same seed, read backwards."""
    config = SyntheticConfig()
    first, second = (getattr(config.build(SEQ_LEN, VOCAB, seed=3), part) for _ in range(2))
    other_seed = getattr(config.build(SEQ_LEN, VOCAB, seed=4), part)
    forwards = [first[index] for index in range(8)]
    backwards = [second[index] for index in reversed(range(8))][::-1]
    for sample, again in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(sample, again)
    assert len({tokens_T.tobytes() for tokens_T, _ in forwards}) == 8
    assert not np.array_equal(forwards[0][0], other_seed[0][0])


def test_samples_are_stable_across_versions():
    """Oracle: recorded numbers; NumPy guarantees its raw Philox bits and SeedSequence across versions."""
    tokens_T, labels_T = SyntheticConfig(branching=8).build(8, 256, seed=0).train[0]
    assert tokens_T.tolist() == [239, 247, 254, 5, 9, 10, 14, 19]
    assert labels_T[:-1].tolist() == tokens_T[1:].tolist()


def test_held_out_samples_end_and_are_disjoint_from_training_samples():
    """Oracle: the tokens themselves, and Python's sequence protocol."""
    dataset = SyntheticConfig(eval_samples=4).build(SEQ_LEN, VOCAB, seed=0)
    assert len(dataset.eval) == len(list(dataset.eval)) == 4
    with pytest.raises(IndexError):
        dataset.eval[-1]
    train = {dataset.train[index][0].tobytes() for index in range(4)}
    assert not train & {dataset.eval[index][0].tobytes() for index in range(4)}


@pytest.mark.parametrize("branching", [1, 8, VOCAB])
def test_entropies_follow_the_formulas(branching):
    """Oracle: counts over 2,000 samples; log(branching) for pairs, log(vocab) for single tokens, bias under 1%."""
    dataset = SyntheticConfig(branching=branching).build(SEQ_LEN, VOCAB, seed=1)
    pairs = np.zeros((VOCAB, VOCAB))
    for index in range(2000):
        tokens_T, labels_T = dataset.train[index]
        np.add.at(pairs, (tokens_T, labels_T), 1)
    assert dataset.conditional_entropy_nats == math.log(branching)
    assert dataset.unigram_entropy_nats == math.log(VOCAB)
    assert entropy_nats(pairs.ravel()) - entropy_nats(pairs.sum(1)) == pytest.approx(math.log(branching), abs=0.01)
    assert entropy_nats(pairs.sum(0)) == pytest.approx(math.log(VOCAB), abs=0.01)
    assert (pairs > 0).sum(1).max() <= branching


def test_ragged_sequences_end_with_ignored_labels_and_padding():
    """Oracle: the same source without ``ragged``, cut where the labels stop; ends cover 1 to T uniformly."""
    ragged = SyntheticConfig(ragged=True).build(SEQ_LEN, VOCAB, seed=2).train
    whole = SyntheticConfig().build(SEQ_LEN, VOCAB, seed=2).train
    ends = []
    for index in range(2000):
        tokens_T, labels_T = ragged[index]
        whole_tokens_T, whole_labels_T = whole[index]
        valid = int((labels_T != IGNORE_INDEX).sum())
        ends.append(valid)
        np.testing.assert_array_equal(labels_T[:valid], whole_labels_T[:valid])
        np.testing.assert_array_equal(tokens_T[: valid + 1], whole_tokens_T[: valid + 1])
        assert (labels_T[valid:] == IGNORE_INDEX).all() and (tokens_T[valid + 1 :] == 0).all()
    assert (min(ends), max(ends)) == (1, SEQ_LEN)
    assert np.mean(ends) == pytest.approx((1 + SEQ_LEN) / 2, rel=0.05)


def test_fingerprint_depends_on_everything_that_determines_the_samples():
    """Oracle: one change at a time."""
    config = SyntheticConfig()
    datasets = [
        config.build(8, 32, 0),
        config.build(9, 32, 0),
        config.build(8, 33, 0),
        config.build(8, 32, 1),
        SyntheticConfig(branching=4).build(8, 32, 0),
        SyntheticConfig(ragged=True).build(8, 32, 0),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == len(datasets)
    assert config.build(8, 32, 0).fingerprint == datasets[0].fingerprint


def test_zero_eval_samples_disable_the_held_out_part():
    """Oracle: the configuration."""
    config = SyntheticConfig(eval_samples=0)
    assert not config.has_eval
    assert config.build(8, 32, 0).eval is None
