"""Fused AdamW on a CPU: bitwise equal for any split of a tensor, with PyTorch's own values."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.optim.vector_adamw import VECTOR_ELEMENTS, VectorAdamW

ELEMENTS = 20_003
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def train(kind: type[torch.optim.Optimizer], sizes: Sequence[int], dtype: torch.dtype, **options: bool) -> Tensor:
    """The same elements after five steps, split into parameters of these sizes; the last one has the rest."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ELEMENTS, generator=generator).to(dtype)
    cut = [*sizes, ELEMENTS - sum(sizes)]
    params = [nn.Parameter(part.clone()) for part in start.split(cut)]
    optimizer = kind(params, **SETTINGS, **options)  # type: ignore[call-arg]
    for step in range(5):
        optimizer.param_groups[0]["lr"] = SETTINGS["lr"] * (step + 1) / 7
        gradient = torch.randn(ELEMENTS, generator=generator).to(dtype)
        for param, part in zip(params, gradient.split(cut), strict=True):
            param.grad = part
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_tensor_splits_or_threads(dtype: torch.dtype) -> None:
    """Oracle: one tensor of all elements; PyTorch's own fused step is equal up to its last vector."""
    whole = train(VectorAdamW, [], dtype, fused=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for sizes in ([0], [1] * 50, [3] * 50, [VECTOR_ELEMENTS], [65, 127, 1000], [10_001]):
                assert torch.equal(train(VectorAdamW, sizes, dtype, fused=True), whole)
    finally:
        torch.set_num_threads(before)
    pytorchs = train(torch.optim.AdamW, [], dtype, fused=True)
    vectors = ELEMENTS // VECTOR_ELEMENTS * VECTOR_ELEMENTS
    assert torch.equal(pytorchs[:vectors], whole[:vectors])


def test_fused_step_matches_the_for_loop_implementation() -> None:
    """Oracle: ``torch.optim.AdamW``, for-loop form, to the rounding of float32."""
    plain = train(torch.optim.AdamW, [777], torch.float32, foreach=False)
    torch.testing.assert_close(train(VectorAdamW, [777], torch.float32, fused=True), plain, rtol=2e-6, atol=1e-7)


def test_parameters_without_a_gradient_are_unchanged() -> None:
    """Oracle: ``torch.optim.AdamW``'s states, and a closure's value."""
    params = [nn.Parameter(torch.ones(size)) for size in (3, 70, 5)]
    optimizer = VectorAdamW(params, fused=True)
    for _ in range(2):
        params[0].grad, params[1].grad = torch.ones(3), torch.ones(70)
        assert optimizer.step(lambda: 4.0) == 4.0
    steps = [optimizer.state[param]["step"].item() if param in optimizer.state else None for param in params]
    assert steps == [2.0, 2.0, None] and torch.equal(params[2].detach(), torch.ones(5))
    assert optimizer.state[params[0]]["exp_avg"].count_nonzero() == 3
