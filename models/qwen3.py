"""Qwen3, dense: Llama's blocks with normalized queries and keys, and a head width independent of
the model's.

Source: arXiv:2505.09388. Tested against transformers' Qwen3ForCausalLM
(``tests/models/test_families.py``). Not covered: sliding windows, biases, dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

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

QWEN3_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


@dataclass
class Qwen3Config(RotaryConfig):
    """A dense Qwen3 model."""

    family: ClassVar[str] = "qwen3"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        keys=ROTARY_KEYS,
        names=ROTARY_NAMES,
        fixed=QWEN3_FIXED,
        written={"attention_dropout": 0.0},
        defaults={**ROTARY_DEFAULTS, "head_dim": 128},
    )

    name: str = "qwen3"
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0

    def build(self) -> "Qwen3Model":
        """Construct the model."""
        return Qwen3Model(self, [SwiGLU(self.dim, self.ffn_dim) for _ in range(self.n_layers)])


class Qwen3Model(RotaryModel):
    """Qwen3 for causal language modeling, with given feed-forwards."""

    def __init__(self, config: Qwen3Config, feed_forwards: list[nn.Module]) -> None:
        blocks = [
            Block(
                rms_norm(config),
                Attention(
                    config.dim,
                    config.n_heads,
                    config.n_kv_heads,
                    config.head_width,
                    qk_norm_eps=config.norm_eps,
                ),
                rms_norm(config),
                feed_forward,
            )
            for feed_forward in feed_forwards
        ]
        super().__init__(config, blocks, rms_norm(config))
