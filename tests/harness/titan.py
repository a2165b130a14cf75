"""torchtitan's Llama 3 and Qwen3 in few lines, with its names of parameters and its rotations.

After torchtitan/models/llama3, torchtitan/models/qwen3 and torchtitan/models/common
(https://github.com/pytorch/torchtitan).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.models import MoEConfig, Qwen3Config, RotaryConfig
from fsdptoys.models.rope_scaling import rope_inv_freq


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Projections(nn.Module):
    """``qkv_linear``: three projections, or one with the rows of each key and value head."""

    def __init__(self, config: RotaryConfig, fused: bool) -> None:
        super().__init__()
        self.groups = config.n_kv_heads
        self.shared = config.n_heads // config.n_kv_heads
        self.width = config.head_width
        if fused:
            heads = config.n_heads + 2 * config.n_kv_heads
            self.wqkv = linear(heads * self.width, config.dim)
        else:
            self.wq = linear(config.n_heads * self.width, config.dim)
            self.wk = linear(self.groups * self.width, config.dim)
            self.wv = linear(self.groups * self.width, config.dim)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the layer."""
        shape = *hidden.shape[:2], -1, self.width
        if hasattr(self, "wqkv"):
            rows = self.wqkv(hidden).view(
                *hidden.shape[:2], self.groups, self.shared + 2, self.width
            )
            sizes = [self.shared, 1, 1]
            return tuple(part.reshape(shape) for part in rows.split(sizes, dim=-2))
        return tuple(w(hidden).view(shape) for w in (self.wq, self.wk, self.wv))


class Attention(nn.Module):
    """Causal attention with grouped keys."""

    def __init__(self, config: RotaryConfig, version: str, fused: bool) -> None:
        super().__init__()
        self.config = config
        self.qkv_linear = Projections(config, fused)
        self.is_old = version == "0.2"
        if self.is_old:  # the names lack a level
            for name, projection in self._modules.pop("qkv_linear").named_children():
                self.add_module(name, projection)
        self.wo = linear(config.dim, config.n_heads * config.head_width)
        self.rotates_neighbors = not isinstance(config, Qwen3Config)
        if isinstance(config, Qwen3Config):
            self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer."""
        if self.is_old:
            shape = *hidden.shape[:2], -1, self.config.head_width
            xq, xk, xv = (w(hidden).view(shape) for w in (self.wq, self.wk, self.wv))
        else:
            xq, xk, xv = self.qkv_linear(hidden)
        if hasattr(self, "q_norm"):
            xq, xk = self.q_norm(xq), self.k_norm(xk)
        config = self.config
        freqs = rope_inv_freq(config.head_width, config.rope_theta, config.rope_scaling)
        angles = torch.outer(torch.arange(hidden.shape[1]).float(), freqs)
        turn = self.turn_neighbors if self.rotates_neighbors else self.turn_halves
        xq, xk, xv = (
            x.transpose(1, 2) for x in (turn(xq, angles), turn(xk, angles), xv)
        )
        out = F.scaled_dot_product_attention(
            xq, xk, xv, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))

    @staticmethod
    def turn_neighbors(x: Tensor, angles: Tensor) -> Tensor:
        """Rotate elements 2i and 2i + 1, as Llama 3 does."""
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return torch.view_as_real(turned).flatten(3)

    @staticmethod
    def turn_halves(x: Tensor, angles: Tensor) -> Tensor:
        """Rotate elements i and i + K/2, as Qwen3 does."""
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        wide = torch.cat((angles, angles), dim=-1)[None, :, None]
        return x * wide.cos() + rotated * wide.sin()


class FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = linear(hidden_dim, dim)
        self.w2 = linear(dim, hidden_dim)
        self.w3 = linear(hidden_dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer."""
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Experts(nn.Module):
    """Stacked feed-forwards."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        sizes = config.n_experts, config.expert_ffn_dim, config.dim
        self.w1 = nn.Parameter(torch.empty(*sizes))
        self.w2 = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))
        self.w3 = nn.Parameter(torch.empty(*sizes))

    def forward(self, hidden: Tensor, expert: int) -> Tensor:
        """Compute the layer."""
        gate = F.silu(hidden @ self.w1[expert].T)
        return (gate * (hidden @ self.w3[expert].T)) @ self.w2[expert].T


class MoE(nn.Module):
    """A router with a normalized softmax, and its experts."""

    expert_bias: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.experts = Experts(config)
        self.router = nn.Module()
        self.router.gate = linear(config.n_experts, config.dim)
        self.register_buffer("expert_bias", torch.zeros(config.n_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer."""
        scores = F.softmax(self.router.gate(hidden), dim=-1)
        chosen = (scores + self.expert_bias).topk(self.top_k, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(
            -1, chosen, scores.gather(-1, chosen)
        )
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = (
            weights[..., [expert]] * self.experts(hidden, expert)
            for expert in range(weights.shape[-1])
        )
        return torch.stack(list(outputs)).sum(0)


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: RotaryConfig, version: str, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(config, version, fused)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if isinstance(config, MoEConfig):
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        mlp: Any = self.moe if hasattr(self, "moe") else self.feed_forward
        return hidden + mlp(self.ffn_norm(hidden))


class Titan(nn.Module):
    """A model of the configuration, with the names of a version."""

    def __init__(
        self, config: RotaryConfig, version: str = "0.2", fused: bool = False
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): Block(config, version, fused) for i in range(config.n_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        head = linear(config.vocab_size, config.dim)
        if config.tie_embeddings:
            head.weight = self.tok_embeddings.weight
        self.head_name = "output" if version == "0.2" else "lm_head"
        setattr(self, self.head_name, head)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the layer."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        logits: Tensor = getattr(self, self.head_name)(self.norm(hidden))
        return logits

    def draw(self) -> None:
        """Fill all parameters with values far from those of an initialization."""
        torch.manual_seed(3)
        for name, param in self.named_parameters():
            nn.init.normal_(param, 1.0 if "norm" in name else 0.0, 0.2)
