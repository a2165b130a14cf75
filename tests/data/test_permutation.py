"""The shuffle is a permutation, and simple statistics do not distinguish it from a random one.

The bounds are those of the statistics' own distributions, five standard deviations wide; keys are
fixed, so that a test passes always or never.
"""

import math

import numpy as np
import pytest

from fsdptoys.data.permutation import EndlessShuffle, Shuffle


def whole(count: int, *key: object) -> np.ndarray:
    shuffle = Shuffle(count, *key)
    return np.array([shuffle[position] for position in range(count)])


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square of equal cells within five standard deviations of its mean."""
    freedom = counts.size - 1
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "counts",
    [
        range(1, 100),
        [base + offset for base in (1024, 4096) for offset in (-1, 0, 1)],
        pytest.param(range(100, 300), marks=pytest.mark.extended),
        pytest.param(
            [9_999, 10_000, 10_001, 65_535, 65_536, 65_537], marks=pytest.mark.extended
        ),
    ],
    ids=["small", "around powers of two", "medium", "large"],
)
def test_shuffle_is_a_permutation_for_every_size(counts):
    """Oracle: sorted numbers, for all small sizes and those around powers of two and squares."""
    for count in counts:
        assert np.array_equal(np.sort(whole(count, count)), np.arange(count)), count


@pytest.mark.parametrize("count", [2**31 + 11, 10**12, 2**53 + 1])
def test_shuffle_supports_sizes_beyond_memory(count):
    """Oracle: a sample of positions has distinct values in range."""
    shuffle = Shuffle(count, "large")
    values = [
        shuffle[position] for position in [*range(1000), *range(count - 1000, count)]
    ]
    assert len(set(values)) == 2000 and all(0 <= value < count for value in values)
    assert_uniform(np.bincount([value * 20 // count for value in values], minlength=20))


@pytest.mark.parametrize(
    "count", [997, 4096, pytest.param(30_000, marks=pytest.mark.extended)]
)
def test_neighboring_values_are_independent(count):
    """Oracle: correlation, chi-square of values and of distances, at lags of 1, 2 and around the
    network's base."""
    values = whole(count, "neighbours")
    base = math.isqrt(count)
    for lag in (1, 2, base - 1, base, base + 1, 2 * base):
        first = values[:-lag]
        second = values[lag:]
        assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(count) < 5
        assert_uniform(
            np.bincount(first * 8 // count * 8 + second * 8 // count, minlength=64)
        )
        assert_uniform(
            np.bincount((second - first) % count * 32 // count, minlength=32)
        )


def test_orders_of_epochs_and_seeds_are_uncorrelated():
    """Oracle: correlation of every pair of six orders; neighboring seeds and epochs are the
    hardest."""
    orders = []
    for seed in (0, 1):
        endless = EndlessShuffle(5000, seed)
        orders += [
            np.array([endless[epoch * 5000 + position] for position in range(5000)])
            for epoch in range(3)
        ]
    assert all(np.array_equal(np.sort(order), np.arange(5000)) for order in orders)
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert abs(np.corrcoef(order, other)[0, 1]) * math.sqrt(5000) < 5
            assert (order == other).sum() < 10
