"""Norms of gradients in parts: their precision, their dtype on each device, and the number of
kernels."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.parallel.gradient_norms import (
    FLOAT32_NORM_ELEMENTS,
    norms_in,
    norms_in_float32,
)
from fsdptoys.parallel.strategy import Strategy

SIZES = (2**22, 3 * FLOAT32_NORM_ELEMENTS + 5, FLOAT32_NORM_ELEMENTS, 1000, 1)


def total(norms: list[Tensor]) -> float:
    return (
        torch.cat([norm.flatten() for norm in norms])
        .double()
        .square()
        .sum()
        .sqrt()
        .item()
    )


@pytest.mark.parametrize("spread", [0, 4, 12], ids="{}_decades".format)
def test_float32_norms_of_parts_add_up_to_the_float64_norm(spread: int) -> None:
    """Oracle: the norm in float64, to 1e-6; numbers of one gradient, and whole gradients, differ by
    decades."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int, shift: float) -> Tensor:
        scales = 10 ** (spread * (torch.rand(size, generator=generator) - 0.5) + shift)
        return torch.randn(size, generator=generator) * scales

    grads = [drawn(size, index * spread / 4 - 3) for index, size in enumerate(SIZES)]
    for chosen in (grads, *([grad] for grad in grads)):
        assert total(norms_in_float32(chosen)) == pytest.approx(
            total(norms_in(torch.float64, chosen)), rel=1e-6
        )
    assert norms_in_float32([]) == []


class Operators(TorchDispatchMode):
    """Counts operators that read whole gradients."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += "norm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "accelerated", "deterministic", "dtype"),
    [
        ("meta", True, False, torch.float32),
        ("meta", True, True, torch.float64),
        ("cpu", True, False, torch.float32),
        ("cpu", True, True, torch.float64),
        ("cpu", False, False, torch.float64),
    ],
)
def test_accelerators_take_norms_in_float32_outside_the_deterministic_mode(
    device: str, accelerated: bool, deterministic: bool, dtype: torch.dtype
) -> None:
    """Oracle: the dtype by hand, and the number of operators.

    The meta device stands for an accelerator; its gradients may be offloaded.
    """
    context = types.SimpleNamespace(
        deterministic=deterministic,
        sum_dtype=torch.float64,
        device=types.SimpleNamespace(is_accelerator=accelerated),
    )
    strategy: Any = types.SimpleNamespace(world=context)
    with Operators() as operators:
        grads = [torch.empty(size, device=device) for size in (*SIZES, *SIZES)]
        norms = Strategy.local_norms(strategy, grads)
        assert {norm.dtype for norm in norms} == {dtype}
        assert {norm.device.type for norm in norms} == {device}
    if dtype is torch.float32:
        # One for each large gradient, and one for all small ones
        assert operators.count == 2 * 3 + 1
