"""Llama 2 and Llama 3: a decoder of pre-normalized blocks with RoPE, grouped-query attention and
SwiGLU.

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783. Tested against transformers'
LlamaForCausalLM (``tests/models/test_families.py``). Not covered: biases, dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from .decoder import rms_norm
from .layers import Attention, Block, SwiGLU
from .rotary import (
    ROTARY_DEFAULTS,
    ROTARY_KEYS,
    ROTARY_NAMES,
    RotaryConfig,
    RotaryFormat,
    RotaryModel,
)


@dataclass
class LlamaConfig(RotaryConfig):
    """A Llama model."""

    family: ClassVar[str] = "llama"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys=ROTARY_KEYS,
        names=ROTARY_NAMES,
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        written={"attention_dropout": 0.0},
        defaults={**ROTARY_DEFAULTS, "n_kv_heads": None},
        drops=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
    )

    name: str = "llama"

    def build(self) -> "LlamaModel":
        """Construct the model."""
        return LlamaModel(self)


class LlamaModel(RotaryModel):
    """Llama for causal language modeling."""

    def __init__(self, config: LlamaConfig) -> None:
        blocks = [
            Block(
                rms_norm(config),
                Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_width),
                rms_norm(config),
                SwiGLU(config.dim, config.ffn_dim),
            )
            for _ in range(config.n_layers)
        ]
        super().__init__(config, blocks, rms_norm(config))
