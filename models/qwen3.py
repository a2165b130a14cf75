"""Qwen3, dense: Llama's blocks with normalized queries and keys, and a head width independent of
the model's.

Source: arXiv:2505.09388. Tested against transformers' Qwen3ForCausalLM
(``tests/models/test_families.py``). Not covered: sliding windows, biases, dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from .rotary import ROTARY_DEFAULTS, RotaryConfig, RotaryFormat
from .self_attention import Attention

QWEN3_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}


@dataclass
class Qwen3Config(RotaryConfig):
    """A dense Qwen3 model."""

    family: ClassVar[str] = "qwen3"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        fixed=QWEN3_FIXED,
        defaults={**ROTARY_DEFAULTS, "head_dim": 128},
    )

    name: str = "qwen3"
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0

    def attention(self, layer: int) -> Attention:
        """Construct an attention with norms of heads."""
        heads = self.n_heads, self.n_kv_heads, self.head_width
        return Attention(self.dim, *heads, qk_norm_eps=self.norm_eps)
