"""Sums over grains: equal in any order."""

from itertools import permutations

import torch

from fsdptoys.models.grain_attention import GRADIENTS, on_grid

PARTS = torch.tensor([2.0, 2.0**-52, 1.0, 2.0**-24, -2.0])
"""Numbers of bfloat16. Without the second their sum is halfway between two float32 numbers."""


def rounded_sums(parts: torch.Tensor) -> set[float]:
    """Float64 sums in every order, rounded to float32."""
    sums = set()
    for order in permutations(parts.double().tolist()):
        total = torch.zeros((), dtype=torch.float64)
        for part in order:
            total += part
        sums.add(total.float().item())
    return sums


def test_sums_of_parts_on_the_grid_are_equal_in_any_order() -> None:
    """Oracle: all orders of five numbers, of which plain float64 sums round to two results."""
    assert rounded_sums(PARTS) == {1.0, 1.0 + 2.0**-23}
    assert rounded_sums(on_grid(PARTS, GRADIENTS)) == {1.0}


def test_grid_rounds_to_multiples_and_keeps_float32_numbers_of_usual_gradients() -> None:
    """Oracle: multiples of 2**-50, to within half of one."""
    parts = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = on_grid(parts, GRADIENTS)
    assert torch.equal(found * 2.0**50, (found * 2.0**50).round())
    assert (found - parts.double()).abs().max() <= 2.0**-51
    assert torch.equal(found.float(), parts)
