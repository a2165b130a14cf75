"""Detection of loss spikes."""

import json
import math
import statistics

import numpy as np
import pytest

from fsdptoys.metrics import SpikeDetector
from fsdptoys.metrics.loss_spikes import FEWEST, LEAST_SIGMA_NATS, WINDOW


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    """Losses from about 10.9 nats to 2.8, as a small model's, with normal noise."""
    numbers = np.arange(1, steps + 1)
    return [float(loss) for loss in 2.5 + 8.4 * numbers**-0.35 + np.random.default_rng(seed).normal(0, noise, steps)]


def test_score_is_the_robust_z_score_of_the_last_losses():
    """Oracle: the formula over the 64 losses before, with the standard library's median."""
    losses = falling(200, 0.05)
    detector = SpikeDetector(1e9)
    for number, loss in enumerate(losses):
        window = losses[max(0, number - WINDOW) : number]
        score = detector.score(loss)
        if number < FEWEST:
            assert score is None
            continue
        median = statistics.median(window)
        deviation = statistics.median([abs(other - median) for other in window])
        assert score == pytest.approx((loss - median) / (1.4826 * deviation))


@pytest.mark.parametrize(
    "noise", [0.0, 0.05, *(pytest.param(noise, marks=pytest.mark.extended) for noise in (0.005, 0.5))]
)
def test_noisy_falling_loss_has_no_spikes_at_the_default(noise):
    """Oracle: none in 10,000 steps of normal noise."""
    detector = SpikeDetector(8.0)
    assert [loss for loss in falling(10_000, noise) if detector.spike(loss) is not None] == []


def test_jump_of_one_nat_is_found_after_the_fast_initial_decrease():
    """Oracle: one jump every 100 steps from step 200 on, each found and nothing else."""
    losses = falling(5_000, 0.05)
    jumps = set(range(199, 5_000, 100))
    detector = SpikeDetector(8.0)
    found = {n for n, loss in enumerate(losses) if detector.spike(loss + (n in jumps)) is not None}
    assert found == jumps


def test_constant_loss_has_the_minimum_deviation():
    """Oracle: jumps of 7.9 and 8.1 times it; no division by zero."""
    detector = SpikeDetector(8.0)
    scores = [detector.score(2.0) for _ in range(40)]
    assert scores[:FEWEST] == [None] * FEWEST and set(scores[FEWEST:]) == {0.0}
    assert detector.spike(2.0 + 7.9 * LEAST_SIGMA_NATS) is None
    assert detector.spike(2.0 + 8.1 * LEAST_SIGMA_NATS) == pytest.approx(8.1)
    assert detector.spike(0.0) is None, "a loss that falls is no spike"


def test_spikes_are_excluded_from_the_window_until_a_new_level():
    """Oracle: the same score for the same jump; after enough spikes for a new window there are no more."""
    detector = SpikeDetector(8.0)
    for loss in falling(300, 0.02)[200:]:
        detector.score(loss)
    first = detector.spike(10.0)
    assert first is not None and detector.spike(10.0) == first
    assert [detector.spike(10.0) is not None for _ in range(30)] == [True] * (FEWEST - 2) + [False] * (32 - FEWEST)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_are_neither_scored_nor_kept(loss):
    """Oracle: the unchanged state."""
    detector = SpikeDetector(8.0)
    for other in falling(40, 0.05):
        detector.score(other)
    before = detector.state_dict()
    assert detector.score(loss) is None and detector.state_dict() == before


def test_threshold_of_zero_disables_detection():
    """Oracle: no score for any loss."""
    detector = SpikeDetector(0.0)
    assert {detector.score(loss) for loss in [1.0] * 50 + [100.0]} == {None}


@pytest.mark.parametrize("steps", [0, 5, 70, 130])
def test_resumed_detector_equals_an_uninterrupted_one(steps):
    """Oracle: the scores of the other, bitwise, with the state taken through JSON amid spikes."""
    losses = falling(200, 0.03)
    for number in range(125, 133):
        losses[number] += 5.0
    whole, stopped, resumed = SpikeDetector(8.0), SpikeDetector(8.0), SpikeDetector(8.0)
    expected = [whole.score(loss) for loss in losses]
    before = [stopped.score(loss) for loss in losses[:steps]]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert before + [resumed.score(loss) for loss in losses[steps:]] == expected
