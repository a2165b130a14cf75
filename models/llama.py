"""Llama 2 and Llama 3: a decoder of pre-normalized blocks with RoPE, grouped-query attention and
SwiGLU, which ``RotaryConfig`` builds.

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783. Tested against transformers'
LlamaForCausalLM (``tests/models/test_families.py``). Not covered: biases, dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from .rotary import ROTARY_DEFAULTS, RotaryConfig, RotaryFormat


@dataclass
class LlamaConfig(RotaryConfig):
    """A Llama model."""

    family: ClassVar[str] = "llama"
    hugging_face: ClassVar[RotaryFormat] = RotaryFormat(
        architecture="LlamaForCausalLM",
        model_type="llama",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        defaults={**ROTARY_DEFAULTS, "n_kv_heads": None},
        drops=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
    )

    name: str = "llama"
