"""Families with rotary positions: settings, and the base of their models.

Source: arXiv:2104.09864; ``rope_scaling`` has the frequencies.

Shapes: K width of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .checks import MOST_CHANNELS, MOST_HIDDEN, above, at_least
from .config import NativeConfig
from .decoder import NativeModel
from .huggingface import HuggingFaceFormat
from .layers import Block, RMSNorm, SwiGLU
from .rope_scaling import (
    RopeKind,
    RopeScaling,
    read_scaling,
    rope_inv_freq,
    write_scaling,
)
from .self_attention import Attention

ROTARY_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Field → key of ``config.json``, in all families with rotary positions."""

ROTARY_NAMES = {
    "": "model.",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}
"""Part of our parameters' names → part of theirs."""

ROTARY_DEFAULTS = {"head_dim": None, "tie_embeddings": False, "init_std": 0.02}


@dataclass
class RotaryConfig(NativeConfig):
    """Shape of a model with rotary positions, grouped key/value heads and gated feed-forwards."""

    n_kv_heads: int = field(default=32, metadata=at_least(1, MOST_CHANNELS))
    """Key and value heads; divides ``n_heads``."""
    head_dim: int | None = field(default=None, metadata=at_least(2, MOST_CHANNELS))
    """Width of a head; null for ``dim / n_heads``."""
    ffn_dim: int = field(default=11008, metadata=at_least(1, MOST_HIDDEN))
    """Width of the feed-forward's hidden layer."""
    rope_theta: float = field(default=10000.0, metadata=above(0, 1e30))
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Stretching of the rotary frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and (
            self.dim % self.n_heads or self.dim // self.n_heads % 2
        ):
            raise ValueError(
                f"model.n_heads={self.n_heads} must divide model.dim={self.dim} into heads of "
                f"even width; set model.dim to a multiple of {2 * self.n_heads}"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim} must be even, since its channels are rotated in "
                f"pairs; set model.head_dim={self.head_dim + 1}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}; "
                f"set model.n_kv_heads={math.gcd(self.n_heads, self.n_kv_heads)}"
            )
        if self.rope_scaling.kind is RopeKind.yarn and self.rope_theta <= 1:
            raise ValueError(
                f"model.rope_theta={self.rope_theta} must be above 1 with "
                "model.rope_scaling.kind=yarn; set model.rope_theta=10000"
            )

    def implied(self) -> dict[str, int]:
        """The width of a head."""
        return {"head_dim": self.dim // self.n_heads}

    @property
    def needs_its_context(self) -> bool:
        """False: rotary positions have no weights, so any context length uses the same ones."""
        return False

    def is_cosmetic(self, key: str) -> bool:
        """Also settings of a disabled scaling, or of another kind."""
        section, _, setting = key.partition(".")
        if section == "rope_scaling":
            return not self.rope_scaling.uses(setting)
        return super().is_cosmetic(key)

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.implied()["head_dim"]

    def attention(self, layer: int) -> Attention:
        """Construct the attention of a block."""
        return Attention(self.dim, self.n_heads, self.n_kv_heads, self.head_width)

    def feed_forward(self, layer: int) -> nn.Module:
        """Construct the feed-forward of a block."""
        return SwiGLU(self.dim, self.ffn_dim)

    def build(self) -> "RotaryModel":
        """Construct the model."""
        return RotaryModel(self)


class RotaryModel(NativeModel):
    """A decoder with blocks that take rotary angles."""

    config: RotaryConfig
    inv_freq: Tensor

    def __init__(self, config: RotaryConfig) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.dim, config.norm_eps)

        blocks = [
            Block(norm(), config.attention(layer), norm(), config.feed_forward(layer))
            for layer in range(config.n_layers)
        ]
        super().__init__(config, blocks, norm())
        self.register_buffer(
            "inv_freq", torch.empty(config.head_width // 2), persistent=False
        )

    def rotations(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions."""
        cos, sin = self.ops.rope_tables(self.inv_freq, positions_T)
        factor = self.config.rope_scaling.table_factor
        return (cos, sin) if factor == 1 else (cos * factor, sin * factor)

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies on the CPU and move them to ``device``."""
        super().init_buffers(device)
        config = self.config
        self.inv_freq = rope_inv_freq(
            config.head_width, config.rope_theta, config.rope_scaling
        ).to(device)


@dataclass(frozen=True)
class RotaryFormat(HuggingFaceFormat):
    """Adds the rotary settings, which transformers 5 keeps in ``rope_parameters``, transformers 4
    in two other keys."""

    keys: Mapping[str, str] = field(default_factory=ROTARY_KEYS.copy)
    names: Mapping[str, str] = field(default_factory=ROTARY_NAMES.copy)
    write_only: Mapping[str, Any] = field(
        default_factory=lambda: {"attention_dropout": 0.0}
    )
    defaults: Mapping[str, Any] = field(default_factory=ROTARY_DEFAULTS.copy)
    default_theta: float = 10000.0
    """Base of the frequencies if ``config.json`` has none."""

    def write_config(self, config: Any) -> dict[str, Any]:
        """``config.json`` with the rotary settings in both spellings."""
        assert isinstance(config, RotaryConfig)
        scaling = write_scaling(config.rope_scaling)
        parameters = (scaling or {"rope_type": "default"}) | {
            "rope_theta": config.rope_theta
        }
        rotary = {
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": parameters,
        }
        return super().write_config(config) | {"head_dim": config.head_width} | rotary

    def read_config(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our configuration, from either spelling."""
        fields = super().read_config(tree)
        rotary = dict(tree.get("rope_parameters") or tree.get("rope_scaling") or {})
        # transformers reads these outside of the section too.
        for key in ("original_max_position_embeddings", "partial_rotary_factor"):
            if tree.get(key) is not None:
                rotary[key] = tree[key]
        scaling = read_scaling(rotary, fields["max_seq_len"], self.model_type)
        theta = rotary.get("rope_theta", tree.get("rope_theta", self.default_theta))
        layers = tree.get("layer_types")
        if isinstance(layers, list) and "sliding_attention" in layers:
            raise ValueError(
                "config.json says layer_types with sliding_attention, which "
                f"{self.model_type} models here do not compute"
            )
        if (
            fields["head_dim"] is not None
            and fields["head_dim"] * fields["n_heads"] == fields["dim"]
        ):
            fields["head_dim"] = None
        n_kv_heads = fields["n_kv_heads"] or fields["n_heads"]
        return fields | {
            "n_kv_heads": n_kv_heads,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
