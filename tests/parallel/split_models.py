"""Models with features, experts and layers that ranks divide, and settings of their runs."""

import dataclasses
from typing import Any

import pytest

from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from tests.harness.tiny import EVEN, EXPERTS, TINY, tiny_model, with_sizes

SPLIT = EVEN | EXPERTS
FEATURES: dict[str, ModelConfig] = {
    "four key heads": with_sizes(tiny_model(), **{**EVEN, "n_kv_heads": 4}),
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], **SPLIT),
    "llama4": with_sizes(TINY["llama4"], **SPLIT, attention_chunk_len=12),
    "gpt2": with_sizes(TINY["gpt2"], **{**EVEN, "ffn_dim": None}),
}
"""Models whose features two ranks divide."""
BIASED = dataclasses.replace(
    with_sizes(tiny_model(), **EVEN), attention_bias=True, mlp_bias=True
)
"""A Llama with all biases."""
STAGES: dict[str, ModelConfig] = {
    "llama": with_sizes(tiny_model(), n_layers=4, **EVEN),
    "qwen3": with_sizes(TINY["qwen3"], n_layers=4),
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], n_layers=4, **SPLIT),
    "llama4": FEATURES["llama4"],
    "gpt2": with_sizes(TINY["gpt2"], n_layers=5, tie_embeddings=False),
    "qwen2": with_sizes(TINY["qwen2"], n_layers=4, tie_embeddings=False, **SPLIT),
}
"""Models with layers for two stages and more."""
needs_sums = pytest.mark.skipif(
    not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients"
)
SELECTIVE = MemoryConfig(gradient_checkpointing=GradientCheckpointing.selective)
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_coef": 1e-3}
