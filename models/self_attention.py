"""Causal self-attention with grouped key/value heads, for all families.

Shapes: B batch, T sequence, S sequence with the cached tokens before it, D width, H query heads, G
key/value heads, K width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import masked_attention
from .cache import KeyValueCache
from .context import FULL_SEQUENCES, Context
from .documents import Documents
from .exchange import Split
from .layers import Linear, RMSNorm
from .ops import Layer
from .rotations import Pairs


@dataclass(frozen=True)
class AttentionTemperature:
    """Scales queries at late positions, so that attention stays sharp (arXiv:2501.19399, as in
    Llama 4)."""

    scale: float
    """Growth of a query with the logarithm of its position."""
    floor: int
    """Tokens before the first growth step, and between two."""

    def factors(self, ordinals: Tensor) -> Tensor:
        """Factors of queries by their positions, counted from one: float32 with a last dim of 1."""
        return (
            torch.log1p((ordinals / self.floor).floor()) * self.scale + 1.0
        ).unsqueeze(-1)


class Attention(Layer):
    """Causal self-attention with grouped key/value heads (arXiv:2305.13245), for all families.

    Args:
        dim: width of the residual stream.
        n_heads: query heads.
        n_kv_heads: key and value heads; divides ``n_heads``.
        head_dim: width of a head.
        bias: whether the projections have biases.
        output_bias: whether the output has one; None for ``bias``.
        qk_norm_eps: normalize queries and keys of each head, with weights, before the rotation
            (Qwen3).
        rotation: pairs of a head that rotary positions turn; None for no rotation.
        rotated_norm_eps: normalize queries and keys, without weights, after the rotation (Llama 4).
        temperature: scales queries by position.
        chunk_len: length of the chunks within which tokens attend; None for the full sequence.
    """

    forward_order = ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj")
    """Children in the order of their forwards; they are registered in another."""
    context: Context = FULL_SEQUENCES
    """Attends without a cache."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        output_bias: bool | None = None,
        qk_norm_eps: float | None = None,
        rotation: Pairs | None = Pairs.halves,
        rotated_norm_eps: float | None = None,
        temperature: AttentionTemperature | None = None,
        chunk_len: int | None = None,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.rotation = rotation
        self.rotated_norm_eps = rotated_norm_eps
        self.temperature = temperature
        self.chunk_len = chunk_len
        self.q_proj = Linear(dim, n_heads * head_dim, bias, split=Split.columns)
        self.k_proj = Linear(dim, n_kv_heads * head_dim, bias, split=Split.columns)
        self.v_proj = Linear(dim, n_kv_heads * head_dim, bias, split=Split.columns)
        self.o_proj = Linear(
            n_heads * head_dim,
            dim,
            bias if output_bias is None else output_bias,
            split=Split.rows,
        )
        self.q_norm = (
            nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        )
        self.k_norm = (
            nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        )

    def forward(
        self,
        hidden_BTD: Tensor,
        rotations: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attend over positions up to each token's own, including cached ones; returns the shape of
        the input.

        With documents, only over positions of the same document.
        """
        hidden_BTD = self.exchange.enter(hidden_BTD)
        B, T, _ = hidden_BTD.shape
        ranks = self.exchange.ranks
        heads = self.n_heads // ranks
        kv_heads = self.n_kv_heads // ranks
        q_BTHK = self.q_norm(self.q_proj(hidden_BTD).view(B, T, heads, self.head_dim))
        k_BTGK = self.k_norm(
            self.k_proj(hidden_BTD).view(B, T, kv_heads, self.head_dim)
        )
        v_BTGK = self.v_proj(hidden_BTD).view(B, T, kv_heads, self.head_dim)
        q_BHTK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        if self.rotation is not None:
            assert rotations is not None
            q_BHTK, k_BGTK = (
                self.ops.rotary(x, *rotations, self.rotation) for x in (q_BHTK, k_BGTK)
            )
        if self.rotated_norm_eps is not None:
            q_BHTK, k_BGTK = (
                self.ops.rms_norm(x.float(), None, self.rotated_norm_eps).type_as(x)
                for x in (q_BHTK, k_BGTK)
            )
        if self.temperature is not None:
            if documents is None:
                first, context = (
                    (1, self.context)
                    if cache is None
                    else (cache.length + 1, FULL_SEQUENCES)
                )
                ordinals = torch.arange(
                    first,
                    first + T * context.ranks,
                    device=q_BHTK.device,
                    dtype=torch.float32,
                )
                ordinals = context.cut(ordinals, 0)
            else:
                ordinals = (documents.positions_BT.unsqueeze(1) + 1).float()
            factors = self.ops.temperature(self.temperature.factors, ordinals)
            q_BHTK = (q_BHTK * factors).type_as(q_BHTK)
        if cache is None:
            mask = None if documents is None else documents.masks[self.chunk_len]
            out_BHTK = self.context.attend(
                q_BHTK, k_BGTK, v_BGTK, self.ops, self.chunk_len, mask
            )
        else:
            out_BHTK = self._attend_cached(q_BHTK, k_BGTK, v_BGTK, cache)
        return self.o_proj(out_BHTK.transpose(1, 2).reshape(B, T, -1))

    def _attend_cached(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, cache: KeyValueCache
    ) -> Tensor:
        start = cache.length
        T = q_BHTK.shape[2]
        end = start + T
        k_BGSK, v_BGSK = cache.extend(self, k_BGTK, v_BGTK)
        S = k_BGSK.shape[2]
        if start == 0:
            out_BHTK = FULL_SEQUENCES.attend(
                q_BHTK, k_BGTK, v_BGTK, self.ops, self.chunk_len
            )
        elif T == 1:
            # One token sees all kept keys
            out_BHTK = masked_attention(q_BHTK, k_BGSK, v_BGSK, None)
        else:
            queries_T1 = torch.arange(start, end, device=q_BHTK.device).unsqueeze(1)
            keys_S = torch.arange(end - S, end, device=q_BHTK.device)
            seen_TS = keys_S <= queries_T1
            if self.chunk_len is not None:
                seen_TS &= keys_S // self.chunk_len == queries_T1 // self.chunk_len
            out_BHTK = masked_attention(q_BHTK, k_BGSK, v_BGSK, seen_TS)
        cache.keep(
            self, k_BGSK, v_BGSK, S if self.chunk_len is None else end % self.chunk_len
        )
        return out_BHTK

    @property
    def flops_per_key(self) -> int:
        """FLOPs of forward and backward in scores and values, per key that a token sees."""
        return 12 * self.n_heads * self.head_dim

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token in scores and values, over half the square of
        each chunk."""
        chunk_len = min(self.chunk_len or seq_len, seq_len)
        chunks, rest = divmod(seq_len, chunk_len)
        keys = (chunks * chunk_len**2 + rest**2) / 2 / seq_len
        return self.flops_per_key * keys
