"""The shuffle is a permutation, and simple statistics do not distinguish it from a random one.

The bounds are those of the statistics' own distributions, five standard deviations wide; keys are
fixed, so that a test passes always or never.
"""

import math
from collections import Counter

import numpy as np
import pytest

from fsdptoys.data.permutation import EndlessShuffle, Shuffle


def whole(count: int, *key: object) -> np.ndarray:
    shuffle = Shuffle(count, *key)
    return np.array([shuffle[place] for place in range(count)])


def assert_uniform(counts: np.ndarray, freedom: int | None = None) -> None:
    """Chi-square of equal cells within five standard deviations of its mean."""
    freedom = freedom or counts.size - 1
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "counts",
    [
        range(1, 100),
        [base + offset for base in (1024, 4096) for offset in (-1, 0, 1)],
        pytest.param(range(100, 300), marks=pytest.mark.extended),
        pytest.param([9_999, 10_000, 10_001, 65_535, 65_536, 65_537], marks=pytest.mark.extended),
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
    values = [shuffle[place] for place in [*range(1000), *range(count - 1000, count)]]
    assert len(set(values)) == 2000 and all(0 <= value < count for value in values)
    assert_uniform(np.bincount([value * 20 // count for value in values], minlength=20))


@pytest.mark.extended
def test_positions_are_uniform_over_keys():
    """Oracle: chi-square of (place, value) over 1,500 keys; a sum of squares of 99 · 99
    freedoms."""
    table = np.zeros((100, 100))
    for key in range(1500):
        table[np.arange(100), whole(100, key)] += 1
    assert_uniform(table, 99 * 99)


@pytest.mark.parametrize("count", [997, 4096, pytest.param(30_000, marks=pytest.mark.extended)])
def test_neighboring_values_are_independent(count):
    """Oracle: correlation, chi-square of values and of distances, at lags of 1, 2 and around the
    network's base."""
    values = whole(count, "neighbours")
    base = math.isqrt(count)
    for lag in (1, 2, base - 1, base, base + 1, 2 * base):
        first, second = values[:-lag], values[lag:]
        assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(count) < 5
        assert_uniform(np.bincount(first * 8 // count * 8 + second * 8 // count, minlength=64))
        assert_uniform(np.bincount((second - first) % count * 32 // count, minlength=32))


@pytest.mark.extended
def test_ascents_and_fixed_points_match_a_random_permutation():
    """Oracle: (n − 1)/2 ascents with variance (n + 1)/12; fixed points as Poisson of mean 1, over
    400 keys of 500."""
    ascents, fixed = [], Counter()
    for key in range(400):
        values = whole(500, key)
        ascents.append(int((np.diff(values) > 0).sum()))
        fixed[int((values == np.arange(500)).sum())] += 1
    assert abs(np.mean(ascents) - 499 / 2) < 5 * math.sqrt(501 / 12 / 400)
    assert 0.7 < np.var(ascents) / (501 / 12) < 1.4
    for number in range(4):
        expected = 400 * math.exp(-1) / math.factorial(number)
        assert abs(fixed[number] - expected) < 5 * math.sqrt(expected)


def test_orders_of_epochs_and_seeds_are_uncorrelated():
    """Oracle: correlation of every pair of six orders, of which neighboring seeds and epochs are
    the hardest."""
    orders = []
    for seed in (0, 1):
        endless = EndlessShuffle(5000, seed)
        orders += [
            np.array([endless[epoch * 5000 + place] for place in range(5000)]) for epoch in range(3)
        ]
    assert all(np.array_equal(np.sort(order), np.arange(5000)) for order in orders)
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert abs(np.corrcoef(order, other)[0, 1]) * math.sqrt(5000) < 5
            assert (order == other).sum() < 10
