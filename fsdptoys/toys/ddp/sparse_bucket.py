"""Sparse gradients for DDP: each is sent by itself, as PyTorch does for ``nn.Embedding(sparse=True)``."""

import torch
from torch import Tensor, nn

from .core import Bucket


class SparseBucket(Bucket):
    """One sparse gradient; its buffer is the gradient itself."""

    def __init__(self, numbers: list[int], params: list[nn.Parameter]) -> None:
        self.numbers, self.params, self.views = numbers, params, []
        self.pending, self.result = 0, None

    def fill(self, slot: int, divisor: float, as_views: bool) -> None:
        """Copy the gradient."""
        (param,) = self.params
        grad = param.grad
        self.buffer = torch.zeros_like(param).to_sparse(1) if grad is None else grad.detach().clone()
        self.buffer.div_(divisor)

    def hand_out(self, slot: int, as_views: bool) -> None:
        """Set the gradient."""
        self.params[slot].grad = self.buffer


def sparse_weights(module: nn.Module) -> set[Tensor]:
    """Return the parameters of a module whose gradients are sparse."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return {layer.weight for layer in layers if layer.sparse}
