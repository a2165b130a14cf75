"""One small model of every family, with all of its features: dense and expert blocks, chunks,
scaling, ties."""

from typing import Any

from fsdptoys.models import (
    GPT2Config,
    Llama4Config,
    LlamaConfig,
    MistralConfig,
    ModelConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoEConfig,
)
from fsdptoys.models.rope_scaling import RopeKind, RopeScaling

SIZES: dict[str, Any] = {"dim": 64, "n_layers": 2, "vocab_size": 96, "max_seq_len": 128}
ROTARY = {**SIZES, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 112}
LLAMA2 = LlamaConfig(**{**ROTARY, "n_kv_heads": 4})

SMALL: dict[str, ModelConfig] = {
    "llama2": LLAMA2,
    "llama3 scaled tied": LlamaConfig(
        **{**ROTARY, "n_layers": 3},
        rope_theta=500.0,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_seq_len=32,
        ),
        tie_embeddings=True,
    ),
    "llama with biases and yarn": LlamaConfig(
        **ROTARY,
        rope_scaling=RopeScaling(
            factor=4.0,
            original_max_seq_len=32,
            kind=RopeKind.yarn,
            attention_factor=1.3,
        ),
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": MistralConfig(
        **ROTARY,
        head_dim=32,
        rope_scaling=RopeScaling(
            factor=8.0,
            original_max_seq_len=64,
            kind=RopeKind.yarn,
            beta_fast=8.0,
            beta_slow=0.5,
            truncate=False,
        ),
    ),
    "qwen2": Qwen2Config(
        **ROTARY,
        rope_scaling=RopeScaling(factor=4.0, kind=RopeKind.linear),
        tie_embeddings=True,
    ),
    "llama4": Llama4Config(
        **{**ROTARY, "n_layers": 4},
        head_dim=32,
        rope_scaling=RopeScaling(
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_seq_len=32,
        ),
        n_experts=4,
        expert_ffn_dim=48,
        moe_every=2,
        attention_chunk_len=24,
        temperature_floor=16,
    ),
    "llama4 in one chunk without temperature and norms, two experts a token": Llama4Config(
        **{**ROTARY, "n_layers": 3, "n_kv_heads": 4},
        n_experts=4,
        top_k=2,
        expert_ffn_dim=48,
        nope_every=2,
        attention_chunk_len=128,
        qk_norm=False,
        attention_temperature=False,
    ),
    "qwen3": Qwen3Config(**ROTARY, head_dim=32),
    "qwen3_moe": Qwen3MoEConfig(
        **ROTARY, head_dim=32, n_experts=8, top_k=2, expert_ffn_dim=40
    ),
    "qwen3_moe dense in turn, not normalized": Qwen3MoEConfig(
        **{**ROTARY, "n_layers": 4},
        n_experts=6,
        top_k=3,
        expert_ffn_dim=40,
        moe_every=2,
        norm_topk_prob=False,
        tie_embeddings=True,
    ),
    "gpt2": GPT2Config(**SIZES, n_heads=4),
    "gpt2 untied": GPT2Config(**SIZES, n_heads=2, ffn_dim=100, tie_embeddings=False),
}
"""Case → its configuration."""

CONVERTIBLE = {
    case: config for case, config in SMALL.items() if config.hugging_face is not None
}
"""Those of families that Hugging Face has too."""
