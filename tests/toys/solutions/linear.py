"""The shard is saved for the backward, and gathered again there."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gather(shard: Tensor) -> Tensor:
    """All ranks' rows."""
    whole = shard.new_empty(len(shard) * dist.get_world_size(), shard.shape[1])
    dist.all_gather_into_tensor(whole, shard)
    return whole


class GatheredLinear(torch.autograd.Function):
    """A linear map that gathers its full weight for each use."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, shard: Tensor) -> Tensor:
        """Save the inputs and the shard."""
        ctx.save_for_backward(inputs, shard)
        return inputs @ gather(shard).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the inputs, and of the rows of this rank."""
        inputs, shard = ctx.saved_tensors
        own = torch.empty_like(shard)
        dist.reduce_scatter_tensor(own, gradient.T @ inputs / dist.get_world_size())
        return gradient @ gather(shard), own


class ShardedLinear(nn.Module):
    """Rows of one rank."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by the full weight."""
        return GatheredLinear.apply(inputs, self.shard)
