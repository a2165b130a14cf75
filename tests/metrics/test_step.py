"""The numbers of a step, and the detection of loss spikes."""

import dataclasses
import json
import math
import statistics
import types
from typing import Any

import numpy as np
import pytest
import torch

from fsdptoys.device import GIB, CountedBytes, Device, MemoryStats, resident_set_bytes
from fsdptoys.metrics import SpikeDetector, StepMetrics, measure_memory, step_rates
from fsdptoys.metrics.loss_spikes import FEWEST, LEAST_SIGMA_NATS, WINDOW
from tests.harness.recording import ROUTING

KEYS = [
    "step", "loss", "grad_norm", "learning_rate", "step_time_seconds", "valid_tokens",
    "tokens_per_second", "tflops_per_second_per_rank", "mfu", "memory_allocated_gib",
    "memory_peak_gib", "memory_reserved_gib", "resident_set_gib", "resident_set_peak_gib",
    "eval_loss", "skipped", "skipped_steps", "loss_spike", "data_wait_seconds",
    "memory_parameters_gib", "memory_gradients_gib", "memory_optimizer_gib", "memory_rest_gib",
    "memory_host_gib", "memory_counted_step",
]  # fmt: skip
ROUTING_KEYS = [
    "router_aux_loss",
    "router_z_loss",
    "router_entropy",
    "expert_load_max",
    "expert_load_min",
]


ON_PAPER = types.SimpleNamespace(memory=lambda: MemoryStats(1 * GIB, 2 * GIB, 3 * GIB))
"""A device with memory of its own, for machines that have none: allocated, peak and reserved
bytes."""


def measure(device: Device, peak_flops: float | None, **changes: float) -> StepMetrics:
    rates = step_rates(
        step_time_seconds=0.5,
        valid_tokens=900,
        tokens=4000,
        flops_per_token=6e9,
        world_size=8,
        peak_flops=peak_flops,
    )
    values: dict[str, Any] = {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.75,
        "learning_rate": 1e-3,
    } | changes
    return StepMetrics(**rates, **measure_memory(device), **values)


@pytest.mark.parametrize(("peak_flops", "mfu"), [(24e12, 0.25), (None, None)])
def test_rates_and_memory_follow_their_formulas(peak_flops, mfu):
    """Oracle: 4000 tokens in 0.5 s are 8000/s, whatever number has labels; at 6e9 FLOPs over 8
    ranks 6e12 FLOP/s each; of a peak of 24e12, 1/4, and an unknown share of an unknown peak; the
    bytes that the device reports."""
    metrics = measure(ON_PAPER, peak_flops)
    memory = (
        metrics.memory_allocated_gib,
        metrics.memory_peak_gib,
        metrics.memory_reserved_gib,
    )
    assert memory == (1, 2, 3)
    assert metrics.tokens_per_second == 8000
    assert metrics.tflops_per_second_per_rank == pytest.approx(6.0)
    assert metrics.mfu == mfu


@pytest.mark.parametrize("routing", [None, ROUTING])
def test_json_line_has_exactly_the_published_keys_and_round_trips(routing):
    """Oracle: the published list of keys, and the written step without its table of tokens."""
    metrics = measure(ON_PAPER, peak_flops=24e12, eval_loss=2.75)
    metrics = dataclasses.replace(metrics, routing=routing)
    line = metrics.to_json()
    values = json.loads(line)
    assert "\n" not in line and list(values) == KEYS + (ROUTING_KEYS if routing else [])
    slim = metrics.without_counts()
    assert slim.to_json() == line and StepMetrics.from_json(line) == slim
    if routing:
        assert slim.routing == dataclasses.replace(ROUTING, counts=[])
        assert [values[key] for key in ROUTING_KEYS] == [2.1, 3.5, 0.9, 1.8, 0.25]


def test_non_finite_values_are_null_and_listed():
    """Oracle: a parser of strict JSON, which refuses NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    routing = dataclasses.replace(ROUTING, z_loss=math.nan)
    metrics = dataclasses.replace(
        measure(Device("cpu"), None),
        loss=math.nan,
        grad_norm=math.inf,
        eval_loss=-math.inf,
        routing=routing,
    )
    values = json.loads(metrics.to_json(), parse_constant=refuse)
    assert values["non_finite"] == ["loss", "grad_norm", "eval_loss", "router_z_loss"]
    assert [values[name] for name in values["non_finite"]] == [None] * 4
    assert values["learning_rate"] == metrics.learning_rate
    back = StepMetrics.from_json(metrics.to_json())
    assert back.routing is not None and back.eval_loss is not None
    assert all(
        math.isnan(value)
        for value in (back.loss, back.grad_norm, back.eval_loss, back.routing.z_loss)
    )
    assert back.routing.aux_loss == ROUTING.aux_loss


def test_lines_of_other_versions_are_read():
    """Oracle: the defaults for keys that an earlier version did not write; those of a later one are
    ignored."""
    metrics = measure(Device("cpu"), None)
    values = json.loads(metrics.to_json()) | {"of_a_later_version": [1]}
    for name in (
        "resident_set_peak_gib",
        "eval_loss",
        "skipped",
        "skipped_steps",
        "loss_spike",
        "data_wait_seconds",
    ):
        del values[name]
    assert StepMetrics.from_json(json.dumps(values)) == dataclasses.replace(
        metrics, resident_set_peak_gib=None
    )


@pytest.mark.parametrize(
    "change",
    [
        {"step": None}, {"step": 1.5}, {"step": True}, {"loss": "2"}, {"loss": None},
        {"mfu": [1]}, {"skipped": 1}, {"non_finite": 1}, {"router_z_loss": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_line_with_an_invalid_value_is_rejected(change):
    """Oracle: ``ValueError``, also for a missing key, half a line, and a non-JSON constant."""
    values = json.loads(measure(Device("cpu"), None).to_json())
    missing = (
        {name: value for name, value in values.items() if name not in change}
        if change == {"step": None}
        else {}
    )
    for line in (
        json.dumps(values | change),
        json.dumps(missing),
        json.dumps(values)[:-1],
        '{"loss": NaN}',
        "[]",
    ):
        with pytest.raises(ValueError):
            StepMetrics.from_json(line)


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    """Losses from about 10.9 nats to 2.8, as a small model's, with normal noise."""
    numbers = np.arange(1, steps + 1)
    return [
        float(loss)
        for loss in 2.5
        + 8.4 * numbers**-0.35
        + np.random.default_rng(seed).normal(0, noise, steps)
    ]


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
    "noise",
    [
        0.0,
        0.05,
        *(pytest.param(noise, marks=pytest.mark.extended) for noise in (0.005, 0.5)),
    ],
)
def test_noisy_falling_loss_has_no_spikes_at_the_default(noise):
    """Oracle: none in 10,000 steps of normal noise."""
    detector = SpikeDetector(8.0)
    assert [
        loss for loss in falling(10_000, noise) if detector.spike(loss) is not None
    ] == []


def test_jump_of_one_nat_is_found_after_the_fast_initial_decrease():
    """Oracle: one jump every 100 steps from step 200 on, each found and nothing else."""
    losses = falling(5_000, 0.05)
    jumps = set(range(199, 5_000, 100))
    detector = SpikeDetector(8.0)
    spikes = {
        n
        for n, loss in enumerate(losses)
        if detector.spike(loss + (n in jumps)) is not None
    }
    assert spikes == jumps


def test_constant_loss_has_the_minimum_deviation():
    """Oracle: jumps of 7.9 and 8.1 times it; no division by zero."""
    detector = SpikeDetector(8.0)
    scores = [detector.score(2.0) for _ in range(40)]
    assert scores[:FEWEST] == [None] * FEWEST and set(scores[FEWEST:]) == {0.0}
    assert detector.spike(2.0 + 7.9 * LEAST_SIGMA_NATS) is None
    assert detector.spike(2.0 + 8.1 * LEAST_SIGMA_NATS) == pytest.approx(8.1)
    assert detector.spike(0.0) is None, "a loss that falls is no spike"


def test_spikes_are_excluded_from_the_window_until_a_new_level():
    """Oracle: the same score for the same jump; after enough spikes for a new window there are no
    more."""
    detector = SpikeDetector(8.0)
    for loss in falling(300, 0.02)[200:]:
        detector.score(loss)
    first = detector.spike(10.0)
    assert first is not None and detector.spike(10.0) == first
    assert [detector.spike(10.0) is not None for _ in range(30)] == [True] * (
        FEWEST - 2
    ) + [False] * (32 - FEWEST)


@pytest.mark.parametrize(
    ("threshold", "loss"),
    [(8.0, math.nan), (8.0, math.inf), (8.0, -math.inf), (0.0, 100.0)],
)
def test_non_finite_losses_and_a_threshold_of_zero_have_no_score(threshold, loss):
    """Oracle: the unchanged state."""
    detector = SpikeDetector(threshold)
    for other in falling(40, 0.05):
        detector.score(other)
    before = detector.state_dict()
    assert detector.score(loss) is None and detector.state_dict() == before


@pytest.mark.parametrize("steps", [0, 5, 70, 130])
def test_resumed_detector_equals_an_uninterrupted_one(steps):
    """Oracle: the scores of the other, bitwise, with the state taken through JSON amid spikes."""
    losses = falling(200, 0.03)
    for number in range(125, 133):
        losses[number] += 5.0
    whole = SpikeDetector(8.0)
    stopped = SpikeDetector(8.0)
    resumed = SpikeDetector(8.0)
    expected = [whole.score(loss) for loss in losses]
    before = [stopped.score(loss) for loss in losses[:steps]]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert before + [resumed.score(loss) for loss in losses[steps:]] == expected


def test_cpu_reports_counted_memory_and_the_resident_set():
    """Oracle: the count; the process's resident set as the kernel reports it, within the growth
    between readings."""
    device = Device("cpu")
    metrics = measure(device, peak_flops=None)
    assert (
        metrics.memory_allocated_gib,
        metrics.memory_peak_gib,
        metrics.memory_rest_gib,
    ) == (
        None,
        None,
        None,
    )
    device.record(
        CountedBytes(0, 2 * GIB, 7 * GIB, {"parameters": 3 * GIB, "rest": 4 * GIB}, GIB)
    )
    metrics = measure(device, peak_flops=None)
    assert (
        metrics.memory_allocated_gib,
        metrics.memory_peak_gib,
        metrics.memory_reserved_gib,
    ) == (
        2,
        7,
        None,
    )
    assert (
        metrics.memory_parameters_gib,
        metrics.memory_gradients_gib,
        metrics.memory_rest_gib,
    ) == (3, 0, 4)
    assert metrics.memory_host_gib == 1
    assert metrics.resident_set_gib == pytest.approx(
        resident_set_bytes() / GIB, rel=0.2
    )


def test_resident_set_peak_includes_freed_memory():
    """Oracle: 64 MiB of ones above the previous resident set, freed before the step is measured."""
    before = resident_set_bytes()
    ones = torch.ones(2**24)
    expected = before + 0.8 * ones.nbytes
    del ones
    metrics = measure(Device("cpu"), peak_flops=None)
    assert (
        metrics.resident_set_peak_gib is not None
        and metrics.resident_set_peak_gib * GIB >= expected
    )
