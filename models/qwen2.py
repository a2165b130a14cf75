"""Qwen2 and Qwen2.5: Llama's blocks with biases of queries, keys and values.

Sources: arXiv:2407.10671, arXiv:2412.15115. Tested against transformers' Qwen2ForCausalLM
(``tests/models/test_families.py``). Not covered: sliding windows, dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from .rotary import RotaryConfig, RotaryFormat
from .self_attention import Attention


@dataclass
class Qwen2Config(RotaryConfig):
    """A Qwen2 model."""

    family: ClassVar[str] = "qwen2"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        fixed={"hidden_act": "silu", "use_sliding_window": False},
    )

    name: str = "qwen2"
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0

    def attention(self, layer: int) -> Attention:
        """Construct an attention with biases of its inputs alone."""
        heads = self.n_heads, self.n_kv_heads, self.head_width
        return Attention(self.dim, *heads, bias=True, output_bias=False)
