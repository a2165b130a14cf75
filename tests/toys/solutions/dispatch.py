"""Counts, rows, results."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Send(torch.autograd.Function):
    """Rows one way, gradients the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows that are sorted by rank."""
        ctx.sent, ctx.received = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Send the gradients back."""
        return Send.apply(gradient, ctx.received, ctx.sent), None, None


def apply_elsewhere(rows: Tensor, targets: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Sort, send, compute, send back, restore the order."""
    counts = torch.bincount(targets, minlength=dist.get_world_size())
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent, received = counts.tolist(), coming.tolist()
    order = targets.argsort(stable=True)
    results = function(Send.apply(rows[order], sent, received))
    return Send.apply(results, received, sent)[order.argsort()]
