"""Training of spread models, and the errors allowed to it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = (torch.float64, torch.float32)


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, divided by the largest expected number."""
    assert found is not None and expected is not None
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


def descend(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    rate: float,
    exchange: Callable[[], object] | None,
) -> list[float]:
    """Take three steps of gradient descent, and return the losses; gradients of the last step
    remain.

    Args:
        model: with the parameters.
        loss_of: computes this rank's part of the loss.
        rate: learning rate.
        exchange: sums the gradients over ranks; None for one process.
    """
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        if exchange is not None:
            exchange()
            dist.all_reduce(loss.detach())
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param -= rate * param.grad
    return losses
