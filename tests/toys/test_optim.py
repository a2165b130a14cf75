"""The optimizers from scratch, next to PyTorch's."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.toys.optim import SGD, AdamW, ToyOptimizer

STEPS = 7
SHAPES = [(3, 5), (64, 33), (1,), (0,), (17,)]
"""Vectorized loops have tails; a rank may hold nothing of a parameter."""


def train(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype
) -> list[nn.Parameter]:
    """Parameters after some steps; one of them has a gradient in every other step only."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in SHAPES
    ]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = kind(groups, **settings)
    for step in range(STEPS):
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(dtype)
            param.grad = gradient if number or step % 2 else None
        optimizer.step()
        optimizer.zero_grad()
    return params


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    ("toy", "native", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.03}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03}),
        (
            SGD,
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
        ),
        (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
        (
            AdamW,
            torch.optim.AdamW,
            {"lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-5},
        ),
    ],
)
def test_updates_have_the_bits_of_torch_optim(
    toy: type[ToyOptimizer],
    native: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Oracle: ``torch.optim`` with ``foreach=False``, by ``torch.equal``, after steps with missing
    gradients."""
    actual = train(toy, settings, dtype)
    expected = train(native, {**settings, "foreach": False}, dtype)
    assert all(
        torch.equal(one, other) for one, other in zip(actual, expected, strict=True)
    )


def test_step_returns_the_loss_of_its_closure() -> None:
    """Oracle: the closure's gradient, which the step applies."""
    param = nn.Parameter(torch.tensor([3.0]))

    def closure() -> float:
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    assert SGD([param], lr=0.25).step(closure) == 9.0
    assert param.item() == 1.5
