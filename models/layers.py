"""Layers that the model families share.

Shapes: B batch, T sequence, D width, H query heads, G key/value heads, K width of a head, F feed-forward width,
V vocabulary, N = B·T tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``loss_fn(hidden_ND, weight_VD, labels_N)``: the loss summed over valid labels, a float32 scalar."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dim, accumulated in float32 (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Normalise; any leading shape."""
        return F.rms_norm(hidden_BTD, self.weight.shape, self.weight, self.eps)


def rope_tables(inv_freq: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles in float32, each of shape (T, K): the two halves of K are alike."""
    positions_T = torch.arange(seq_len, device=inv_freq.device, dtype=torch.float32)
    angles = torch.outer(positions_T, inv_freq.float()).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate pairs (i, i + K/2) by their angles, computed in float32 and returned in the input's dtype."""
    x = x_BHTK.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK).to(x_BHTK.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads (arXiv:2305.13245)."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, hidden_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Attend over positions up to each token's own; returns the shape of the input."""
        B, T, _ = hidden_BTD.shape
        q_BHTK = self.q_proj(hidden_BTD).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k_BGTK = self.k_proj(hidden_BTD).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v_BGTK = self.v_proj(hidden_BTD).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q_BHTK, k_BGTK = apply_rope(q_BHTK, cos_TK, sin_TK), apply_rope(k_BGTK, cos_TK, sin_TK)
        out_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=self.n_kv_heads != self.n_heads
        )
        return self.o_proj(out_BHTK.transpose(1, 2).reshape(B, T, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim; any leading shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))


class LMHead(nn.Linear):
    """The output projection, which computes an injected loss inside its own forward.

    Whoever shards this module gathers its weight for the forward and the backward, so that the loss, chunked or not,
    never has to know whether the weight is sharded.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, hidden_BTD: Tensor, labels_BT: Tensor | None = None, loss_fn: LossFn | None = None) -> Tensor:
        """Logits_BTV, or ``loss_fn(hidden_ND, weight_VD, labels_N)`` where labels are given."""
        if labels_BT is None:
            return super().forward(hidden_BTD)
        if loss_fn is None:
            raise ValueError("labels were given without a loss_fn to compare them with")
        return loss_fn(hidden_BTD.flatten(0, 1), self.weight, labels_BT.flatten())
