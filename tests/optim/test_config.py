"""Schedules against their formulas, and parameter groups."""

import math

import pytest
import torch
from torch import nn

from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    OptimConfig,
    Schedule,
    SGDConfig,
    WeightDecayOn,
    build_optimizer,
)
from fsdptoys.optim.config import build_schedule

SCHEDULES: dict[str, tuple[OptimConfig, list[float]]] = {
    "constant after a warm-up": (
        AdamWConfig(schedule=Schedule.constant, warmup_steps=4),
        [0.25, 0.5, 0.75, 1, 1, 1, 1],
    ),
    "half a cosine": (
        SGDConfig(schedule=Schedule.cosine, warmup_steps=2, min_lr_ratio=0.2),
        [
            0.5,
            1.0,
            *(0.2 + 0.4 * (1 + math.cos(math.pi * step / 10)) for step in range(11)),
        ],
    ),
    "a line over the last share": (
        AdamWConfig(schedule=Schedule.wsd, min_lr_ratio=0.0, decay_share=0.5),
        [1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0],
    ),
    "stable without decay": (
        AdamWConfig(schedule=Schedule.wsd, decay_share=0.0),
        [1] * 5,
    ),
    "warm-up longer than the run": (AdamWConfig(warmup_steps=10), [0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_drives_the_optimizer(name: str) -> None:
    """Oracle: the highest learning rate times these ratios, by the formulas."""
    config, ratios = SCHEDULES[name]
    optimizer = build_optimizer(
        config, [("weight", nn.Parameter(torch.ones(2, 2)))], {"weight"}
    )
    schedule = build_schedule(config, optimizer, len(ratios))
    rates = []
    for _ in ratios:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(
        [config.lr * ratio for ratio in ratios], rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize(
    ("decay_on", "expected"),
    [
        (WeightDecayOn.matrices, {0.1: ["0.weight"], 0.0: ["0.bias"]}),
        (WeightDecayOn.all, {0.1: ["0.weight", "0.bias"]}),
    ],
)
def test_weight_decay_applies_to_the_configured_parameters(
    decay_on: WeightDecayOn, expected: dict[float, list[str]]
) -> None:
    """Oracle: names by hand."""
    model = nn.Sequential(nn.Linear(2, 3))
    names = {param: name for name, param in model.named_parameters()}
    config = AdamWConfig(weight_decay_on=decay_on)
    optimizer = build_optimizer(config, model.named_parameters(), {"0.weight"})
    assert {
        group["weight_decay"]: [names[p] for p in group["params"]]
        for group in optimizer.param_groups
    } == expected


@pytest.mark.parametrize("implementation", list(Implementation))
def test_implementation_reaches_pytorch(implementation: Implementation) -> None:
    """Oracle: the flags of torch.optim's groups."""
    params = [("weight", nn.Parameter(torch.ones(2, 2)))]
    for config in (
        AdamWConfig(implementation=implementation),
        SGDConfig(implementation=implementation),
    ):
        group = build_optimizer(config, params, {"weight"}).param_groups[0]
        assert bool(group["fused"]) == (implementation is Implementation.fused)
        assert bool(group["foreach"]) == (implementation is Implementation.foreach)
        if implementation is Implementation.for_loop:
            assert group["fused"] is False and group["foreach"] is False


def test_settings_reach_pytorch() -> None:
    """Oracle: torch.optim's own groups."""
    params = [("weight", nn.Parameter(torch.ones(2, 2)))]
    adamw = build_optimizer(
        AdamWConfig(lr=0.1, beta1=0.8, beta2=0.7, eps=1e-3, weight_decay=0.3),
        params,
        {"weight"},
    )
    group = adamw.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.1,
        (0.8, 0.7),
        1e-3,
        0.3,
    )
    sgd = build_optimizer(
        SGDConfig(lr=0.1, momentum=0.5, nesterov=True), params, {"weight"}
    ).param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"]) == (0.1, 0.5, True)
