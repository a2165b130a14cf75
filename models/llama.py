"""Llama 2 and Llama 3: a decoder of pre-normalised blocks with RoPE, grouped-query attention and SwiGLU.

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783; held against transformers' LlamaForCausalLM in
``tests/models/test_llama.py``. Not covered: biases, dropout, document masks, key/value caches.

Shapes: B batch, T sequence, D width, V vocabulary, K width of a head.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .decoder import DecoderModel
from .layers import Attention, LMHead, LossFn, RMSNorm, SwiGLU, rope_tables


@dataclass
class RopeScaling:
    """Llama 3's stretching of rotary frequencies to a longer context (arXiv:2407.21783, published as ``llama3``)."""

    factor: float = 1.0
    """How many times longer the low frequencies' wavelengths become; 1 switches scaling off."""
    low_freq_factor: float = 1.0
    """Wavelengths above ``original_max_seq_len / low_freq_factor`` are stretched in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below ``original_max_seq_len / high_freq_factor`` stay as they are."""
    original_max_seq_len: int = 8192
    """Context length of the pre-training before the stretch, in tokens."""


@dataclass
class LlamaConfig:
    """Shape and initialisation of a Llama model."""

    name: str = "llama"
    """Name of the preset, for titles."""
    dim: int = 4096
    """Width of the residual stream."""
    n_layers: int = 32
    """Number of blocks."""
    n_heads: int = 32
    """Query heads; divides ``dim``."""
    n_kv_heads: int = 32
    """Key and value heads; divides ``n_heads``."""
    ffn_dim: int = 11008
    """Width of the feed-forward's hidden layer."""
    vocab_size: int = 32000
    """Number of token ids."""
    max_seq_len: int = 4096
    """Longest sequence the positions are meant for, in tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Stretching of the rotary frequencies."""
    tie_embeddings: bool = False
    """Share one weight between the token embedding and the head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it over sqrt(2·n_layers)."""

    def __post_init__(self) -> None:
        """Check what holds for every Llama.

        Raises:
            ValueError: naming the key, its value and the fix.
        """
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1; set model.{name}=1")
        if self.dim % self.n_heads or self.dim // self.n_heads % 2:
            raise ValueError(
                f"model.n_heads={self.n_heads} must divide model.dim={self.dim} into heads of even width; "
                f"set model.dim to a multiple of {2 * self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}; "
                f"set model.n_kv_heads={math.gcd(self.n_heads, self.n_kv_heads)}"
            )
        for name, value, fix in (
            ("init_std", self.init_std, 0.02),
            ("norm_eps", self.norm_eps, 1e-5),
            ("rope_theta", self.rope_theta, 10000.0),
            ("rope_scaling.low_freq_factor", self.rope_scaling.low_freq_factor, 1.0),
            ("rope_scaling.original_max_seq_len", self.rope_scaling.original_max_seq_len, 8192),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"model.{name}={value} must be a finite number above 0; set model.{name}={fix}")
        if not self.rope_scaling.low_freq_factor < self.rope_scaling.high_freq_factor < math.inf:
            raise ValueError(
                f"model.rope_scaling.high_freq_factor={self.rope_scaling.high_freq_factor} must be above "
                f"model.rope_scaling.low_freq_factor={self.rope_scaling.low_freq_factor}; "
                f"set model.rope_scaling.high_freq_factor={4 * self.rope_scaling.low_freq_factor}"
            )
        if not 1 <= self.rope_scaling.factor < math.inf:
            raise ValueError(
                f"model.rope_scaling.factor={self.rope_scaling.factor} must be at least 1; "
                "set model.rope_scaling.factor=1 for no scaling"
            )


def rope_inv_freq(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies in radians a token, float32, shape (K/2,), with Llama 3's scaling applied."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling.factor == 1:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    unscaled_share = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - unscaled_share) * inv_freq / scaling.factor + unscaled_share * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / scaling.factor, inv_freq)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), between, scaled)


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config.dim, config.n_heads, config.n_kv_heads)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_dim)

    def forward(self, hidden_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        hidden_BTD = hidden_BTD + self.attn(self.attn_norm(hidden_BTD), cos_TK, sin_TK)
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class LlamaModel(DecoderModel):
    """Llama for causal language modelling."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = LMHead(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", torch.empty(config.dim // config.n_heads // 2), persistent=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None, loss_fn: LossFn | None = None) -> Tensor:
        """See ``DecoderModel``."""
        cos_TK, sin_TK = rope_tables(self.inv_freq, tokens_BT.shape[1])
        hidden_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, cos_TK, sin_TK)
        return self.lm_head(self.norm(hidden_BTD), labels_BT, loss_fn)

    def init_rows(self, name: str, rows: Tensor, generator: torch.Generator) -> None:
        """Ones for norms, normal values for the rest, smaller for projections into the residual stream."""
        if name.endswith("norm.weight"):
            rows.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            rows.normal_(0.0, self.config.init_std / math.sqrt(2 * self.config.n_layers), generator=generator)
        else:
            rows.normal_(0.0, self.config.init_std, generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies on the CPU and put them on ``device``."""
        head_dim = self.config.dim // self.config.n_heads
        self.inv_freq = rope_inv_freq(head_dim, self.config.rope_theta, self.config.rope_scaling).to(device)

    def flops_per_token(self, seq_len: int) -> float:
        """See ``DecoderModel``."""
        c = self.config
        head_dim = c.dim // c.n_heads
        attn = 2 * c.dim * c.n_heads * head_dim + 2 * c.dim * c.n_kv_heads * head_dim
        matmul_params = c.n_layers * (attn + 3 * c.dim * c.ffn_dim) + c.dim * c.vocab_size
        return 6 * matmul_params + 6 * c.n_layers * c.n_heads * head_dim * seq_len
