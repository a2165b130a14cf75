"""Llama 2 and Llama 3: a decoder of pre-normalized blocks with RoPE, grouped-query attention and
SwiGLU, which ``RotaryConfig`` builds.

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783. Tested against transformers'
LlamaForCausalLM (``tests/models/test_families.py``). Not covered: dropout.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from .layers import SwiGLU
from .rope_scaling import LATER
from .rotary import ROTARY_DEFAULTS, ROTARY_KEYS, RotaryConfig, RotaryFormat
from .self_attention import Attention


@dataclass
class LlamaConfig(RotaryConfig):
    """A Llama model."""

    family: ClassVar[str] = "llama"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys={
            **ROTARY_KEYS,
            "attention_bias": "attention_bias",
            "mlp_bias": "mlp_bias",
        },
        fixed={"hidden_act": "silu"},
        defaults={
            **ROTARY_DEFAULTS,
            "n_kv_heads": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
        drops=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
    )

    name: str = "llama"
    attention_bias: bool = field(default=False, metadata=LATER)
    """Add biases to queries, keys, values and the attention's output."""
    mlp_bias: bool = field(default=False, metadata=LATER)
    """Add biases to the projections of the feed-forward."""

    def attention(self, layer: int) -> Attention:
        """Construct an attention, with biases if set."""
        heads = self.n_heads, self.n_kv_heads, self.head_width
        return Attention(self.dim, *heads, bias=self.attention_bias)

    def feed_forward(self, layer: int) -> nn.Module:
        """Construct a feed-forward, with biases if set."""
        return SwiGLU(self.dim, self.ffn_dim, self.mlp_bias)
