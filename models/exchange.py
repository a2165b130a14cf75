"""Collectives of ranks that split the features of a model's layers, as the layers see them.

A layer begins with ``enter`` and ends with ``leave``; on one rank both are the identity. Each layer
declares how its parameters are split (``Split``). Tensor parallelism (``fsdptoys.parallel``) splits
them so, and sets another ``Exchange`` on every layer.

Shapes: B batch, T tokens of a sequence, t of this rank's part, D width, V classes.
"""

from collections.abc import Callable
from enum import Enum

from torch import Tensor


class Split(Enum):
    """The part of a layer's own parameters that a rank has."""

    columns = 0
    """Rows of a weight (out, in) and of a bias: some outputs, or some classes of an embedding."""
    rows = 1
    """Columns of a weight (out, in): some inputs; their products are summed. The bias in full."""
    replicated = None
    """All of them, for some tokens or heads, so that each rank has a part of the gradient."""


class Exchange:
    """One rank has all features and tokens."""

    ranks = 1

    def begin(self, in_full: bool) -> None:
        """Begin a forward of the model; ``in_full`` if every rank computes all tokens."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Begin a layer: this rank's tokens (B, t, D) → all tokens (B, T, D)."""
        return hidden

    def leave(self, partial: Tensor) -> Tensor:
        """End a layer: a partial sum of all tokens (B, T, D) → the sum of this rank's (B, t, D)."""
        return partial

    def sum_gradient(self, param: Tensor) -> Tensor:
        """Return a replicated parameter; its gradient is summed over ranks."""
        return param

    def gather_classes(self, logits_BTV: Tensor) -> Tensor:
        """Logits of all classes, without gradients."""
        return logits_BTV

    def own_tokens(self, positions: Tensor) -> Tensor:
        """This rank's part of a tensor with tokens as its last dim."""
        return positions

    def embed(
        self,
        embedding: Callable[[Tensor, Tensor], Tensor],
        ids_BT: Tensor,
        table_VD: Tensor,
    ) -> Tensor:
        """Rows of a table that ranks split by classes: all ids (B, T) → this rank's tokens."""
        return embedding(ids_BT, table_VD)


ONE_RANK = Exchange()
