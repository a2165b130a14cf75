"""The model of this project's first published table: Llama2 without fused operators.

After ``models/llama2.py`` (57409f5) and ``accelerate/loss.py`` (0770205) of
github.com/icerain-alt/FSDPToys, for ``published_programs``: the same tensors, in the same order,
with the same lifetimes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Sizes:
    """Model and batch; the published ones by default."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    ffn_dim: int = 11008
    vocab_size: int = 32000
    positions: int = 65536
    """Rows of the rotary table: twice the longest sequence."""
    seq_len: int = 4096
    batch_size: int = 1
    chunk_tokens: int = 1024


class RMSNorm(nn.Module):
    """Unfused normalization in float32, rounded before the weight is applied."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


class Attention(nn.Module):
    """Multi-head attention that computes its sines in each layer, in float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.n_heads = sizes.n_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(sizes.dim, sizes.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend causally; angles of shape (T, K)."""
        batch, seq_len, dim = x.shape
        heads = (batch, seq_len, self.n_heads, dim // self.n_heads)
        # All three projections exist before the first is reshaped.
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = query.view(heads), key.view(heads), value.view(heads)
        query, key = _rotate(query, key, angles)
        query, key, value = (
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).contiguous().view(batch, seq_len, dim))


def _rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions over halves: each product and each cast is a tensor of its own."""
    cosines = angles.cos().unsqueeze(0).unsqueeze(2)
    sines = angles.sin().unsqueeze(0).unsqueeze(2)
    turned_query = query.float() * cosines + _swap_halves(query.float()) * sines
    turned_key = key.float() * cosines + _swap_halves(key.float()) * sines
    return turned_query.type_as(query), turned_key.type_as(key)


def _swap_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer, with its parameters in the published order."""

    attention: nn.Module
    feed_forward: nn.Module

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        attention_norm: nn.Module,
        feed_forward_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.feed_forward_norm = feed_forward_norm

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Transform activations of shape (B, T, D); ``positions`` are the attention's angles."""
        hidden = x + self.attention(self.attention_norm(x), positions)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Llama2(nn.Module):
    """The model without its loss: the head is applied, or read, from outside."""

    angles: Tensor

    def __init__(self, sizes: Sizes, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.dim)
        # The full angle appears in both halves, in float32.
        self.register_buffer(
            "angles", torch.empty(sizes.positions, sizes.dim // sizes.n_heads)
        )
        self.layers = nn.ModuleList(
            Block(
                Attention(sizes),
                FeedForward(sizes.dim, sizes.ffn_dim),
                RMSNorm(sizes.dim),
                RMSNorm(sizes.dim),
            )
            for _ in range(sizes.n_layers)
        )
        self.norm = RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def blocks(self) -> list[Block]:
        """The layers, before anything is put around them."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states of shape (B, T, D) for tokens of shape (B, T)."""
        hidden = self.embedding(tokens)
        self.angles = self.angles.to(hidden.device)
        angles = self.angles[: tokens.shape[1]]
        for layer in self.layers:
            if self.checkpointing:
                # The unit is inside the checkpoint: its parameters are gathered again by the
                # recomputation.
                hidden = checkpoint(
                    layer, x=hidden, positions=angles, use_reentrant=False
                )
            else:
                hidden = layer(x=hidden, positions=angles)
        return self.norm(hidden)


class ChunkedLoss(torch.autograd.Function):
    """The loss chunk by chunk, with the gradients of each taken at once by a function transform."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int
    ) -> Tensor:
        """Mean cross entropy; keeps both gradients for the backward."""
        total = torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight)
        chunks = zip(
            hidden.split(chunk_tokens, 1),
            hidden_grad.split(chunk_tokens, 1),
            labels.split(chunk_tokens, 1),
            strict=True,
        )
        for part, part_grad, part_labels in chunks:
            gradients, loss = torch.func.grad_and_value(_summed_loss, argnums=(0, 1))(
                part, weight, part_labels
            )
            total.add_(loss)
            part_grad.copy_(gradients[0])
            weight_grad.add_(gradients[1])
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total.div_(labels.numel())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Yield the kept tensors; the host reads whether there is anything to scale."""
        hidden_grad, weight_grad = ctx.saved_tensors
        if torch.ne(gradient, torch.ones((), device=gradient.device)):
            hidden_grad, weight_grad = hidden_grad * gradient, weight_grad * gradient
        return hidden_grad, weight_grad, None, None


def _summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden.contiguous().flatten(0, 1), weight).float()
    return F.cross_entropy(logits, labels.contiguous().flatten(), reduction="sum")
