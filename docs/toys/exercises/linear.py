"""Exercise 6, before ``fsdptoys/toys/fsdp``: the smallest FSDP there is, a linear layer that no
rank has whole.

Each rank keeps 1/N of the rows. The forward needs all of them, for a moment; the backward needs
them again, and makes gradients of all of them, of which each rank needs its own, averaged over the
ranks.

Needed: ``torch.autograd.Function``, ``all_gather_into_tensor``, ``reduce_scatter_tensor``. Mind the
tensors saved for the backward.
"""

from torch import Tensor, nn


class ShardedLinear(nn.Module):
    """``nn.functional.linear`` by a weight that ranks shard by rows.

    Between forward and backward nothing of the whole weight's size is kept. A forward and its
    backward take two all-gathers and one reduce-scatter.

    Args:
        weight: whole, the same on all ranks, (out, in); out is a multiple of the number of ranks.

    Attributes:
        shard: this rank's rows, the only parameter; its gradient is the mean over the ranks.
    """

    shard: nn.Parameter

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Of (batch, in), which differ from rank to rank and may want a gradient, to (batch,
        out)."""
        raise NotImplementedError
