"""Stochastic rounding from float32 to bfloat16."""

import torch

from fsdptoys.memory.state_streaming import round_stochastically


def test_stochastic_rounding_is_unbiased_and_keeps_values_exact_in_bfloat16() -> None:
    """Oracle: the mean of 4,000 roundings within five standard errors, each at most half a step over sqrt(4000)."""
    values = torch.cat([torch.linspace(1, 1.98, 33) + 1e-3, -torch.linspace(1, 1.98, 33) - 1e-3])
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 2.0**-130])
    source = torch.cat([values, exact])
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(len(values), dtype=torch.float64)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    draws = 4000
    for _ in range(draws):
        round_stochastically(target, source, generator)
        total += target[: len(values)]
        step = 2.0**-7
        assert ((target[: len(values)].float() - values).abs() < step).all()
        assert torch.equal(target[len(values) :].float(), exact)
    assert ((total / draws - values).abs() < 5 * 0.5 * 2.0**-7 / draws**0.5).all()
    round_stochastically(target[:1], torch.tensor([float("nan")]), generator)
    assert target[0].isnan()
