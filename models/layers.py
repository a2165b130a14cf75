"""Layers that the model families share.

Shapes: B batch, T sequence, D width, F feed-forward width, V vocabulary, N = B·T tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .cache import KeyValueCache
from .documents import Documents
from .exchange import Split
from .initial import Initial, normal, ones, residual, zeros
from .ops import Layer

LossFn = Callable[..., Tensor]
"""``loss_fn(hidden_ND, weight_VD, labels_N)``: the loss summed over valid labels, a float32 scalar.

A head with a bias or a soft cap also passes ``bias_V`` and ``softcap`` by name.
"""


def matmul_flops(elements: int, trains: bool) -> int:
    """FLOPs of forward and backward per token, by the elements of a weight that trains or is
    frozen."""
    return (6 if trains else 4) * elements


class Linear(Layer, nn.Linear):
    """``torch.nn.Linear``, one of the projections that begin or end a layer, or neither."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split: Split | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.split = split
        weight = residual if split is Split.rows else normal
        self.initial = {"weight": weight, "bias": zeros}

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the last dim; any leading shape."""
        return self.multiply(input)

    def multiply(self, input: Tensor) -> Tensor:
        """The product alone, which a subclass may add to."""
        if self.split is Split.columns:
            return self.ops.linear_columns(input, self.weight, self.bias)
        if self.split is Split.rows:
            return self.ops.linear_rows(input, self.weight, self.bias, self.exchange)
        return self.ops.linear(input, self.weight, self.bias)

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of its matmul."""
        # None for a quantized one, which is frozen
        weight = self._parameters.get("weight")
        trains = weight is not None and weight.requires_grad
        return matmul_flops(self.in_features * self.out_features, trains)


class Embedding(Layer, nn.Embedding):
    """Vectors of token ids. Ranks may have some classes each."""

    split: Split | None = Split.columns

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Look up rows; any shape of ids."""
        return self.exchange.embed(self.ops.embedding, ids_BT, self.weight)


class PositionEmbedding(Embedding):
    """Vectors of positions, which all ranks have for their tokens."""

    split = Split.replicated

    def forward(self, positions: Tensor) -> Tensor:
        """Look up rows; positions (T,) or (B, T)."""
        weight = self.exchange.sum_gradient(self.weight)
        return self.ops.embedding(self.exchange.own_tokens(positions), weight)


class RMSNorm(Layer):
    """Root-mean-square normalization over the last dim, accumulated in float32
    (arXiv:1910.07467)."""

    split = Split.replicated
    initial: Mapping[str, Initial] = {"weight": ones}

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Normalize; any leading shape."""
        weight = self.exchange.sum_gradient(self.weight)
        # A view's gradient has the dtype of the weight; FSDP2 of torch 2.15 accepts float32 for a
        # bf16 weight itself.
        return self.ops.rms_norm(hidden_BTD, weight.view_as(weight), self.eps)


class LayerNorm(Layer, nn.LayerNorm):
    """Normalization of mean and variance over the last dim (arXiv:1607.06450)."""

    split = Split.replicated
    initial: Mapping[str, Initial] = {"weight": ones, "bias": zeros}

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Normalize; any leading shape."""
        weight, bias = (
            self.exchange.sum_gradient(param) for param in (self.weight, self.bias)
        )
        return self.ops.layer_norm(hidden_BTD, weight, bias, self.eps)


class SwiGLU(Layer):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, ffn_dim, bias, split=Split.columns)
        self.up_proj = Linear(dim, ffn_dim, bias, split=Split.columns)
        self.down_proj = Linear(ffn_dim, dim, bias, split=Split.rows)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim; any leading shape."""
        hidden_BTD = self.exchange.enter(hidden_BTD)
        # Without names for the two wide results, which would keep them until the end of ``down``.
        return self.down_proj(
            self.ops.swiglu(self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD))
        )


class GELUFeedForward(Layer):
    """Feed-forward with the tanh form of GELU (arXiv:1606.08415), and biases."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up_proj = Linear(dim, ffn_dim, split=Split.columns)
        self.down_proj = Linear(ffn_dim, dim, split=Split.rows)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim; any leading shape."""
        return self.down_proj(
            self.ops.gelu(self.up_proj(self.exchange.enter(hidden_BTD)))
        )


class RunnableBlock(nn.Module):
    """A block that may compute in compiled form, and again in the backward."""

    execute: Callable[..., Any] | None = None
    """What runs in place of ``compute``, such as its compiled form."""
    recompute: Callable[..., Any] | None = None
    """``recompute(function, *args, **kwargs)`` calls a function, and again in the backward; None to
    keep its activations."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``compute`` as set. A strategy's hooks run outside of it."""
        function = self.execute or self.compute
        return (
            function(*args, **kwargs)
            if self.recompute is None
            else self.recompute(function, *args, **kwargs)
        )

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        raise NotImplementedError


class Block(RunnableBlock):
    """Attention and feed-forward, each pre-normalized and added to the residual stream."""

    def __init__(
        self, attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def compute(
        self,
        hidden_BTD: Tensor,
        rotations: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the residual stream after this block."""
        hidden_BTD = hidden_BTD + self.attn(
            self.attn_norm(hidden_BTD), rotations, cache, documents
        )
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class LMHead(Linear):
    """The output projection, which computes an injected loss inside its own forward.

    FSDP gathers the module's weight for forward and backward, so the loss, chunked or not, need not
    know about sharding.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False, split=Split.columns)

    def forward(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Logits_BTV, or ``loss_fn(hidden_ND, weight_VD, labels_N)`` if labels are given."""
        hidden_BTD = self.exchange.enter(hidden_BTD)
        if labels_BT is None:
            return self.exchange.gather_classes(self.multiply(hidden_BTD))
        if loss_fn is None:
            raise ValueError("labels were given without a loss_fn to compare them with")
        return loss_fn(hidden_BTD.flatten(0, 1), self.weight, labels_BT.flatten())
