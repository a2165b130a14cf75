"""Tiny configurations of families of transformers: width 64, two layers, four heads, two key and
value heads, 256 ids, four experts."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Settings that most families have."""

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention and grouped experts."""
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
"""Delta rules in turn with attention."""
WINDOWS: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
INDEXER: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma": {},
    "gemma2": {
        **WINDOWS,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
    },
    "gpt_oss": {**EXPERTS, **WINDOWS},
    "deepseek_v3": LATENT,
    "glm4": {"partial_rotary_factor": 0.5},
    "falcon": {
        "head_dim": None,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "alibi": False,
    },
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt2": {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
        "num_experts_per_tok": 1,
    },
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "minimax": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 16,
    },
    "minimax_m2": {**EXPERTS, "rotary_dim": 8},
    "kimi_linear": {
        **LATENT,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "q_lora_rank": None,
    },
    "gemma4_text": {
        **WINDOWS,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    },
    "gemma3n_text": {
        **WINDOWS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "intermediate_size": [128, 128],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "olmo3": WINDOWS,
    "olmoe": {**EXPERTS, "num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {**WINDOWS, "logit_scale": 0.0625},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "glm_moe_dsa": {**LATENT, **INDEXER},
    "deepseek_v2": {**LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**LATENT, **INDEXER},
    "granitemoe": {**EXPERTS, "logits_scaling": 1.0},
    "granitemoehybrid": {
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 64,
    },
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "exaone4": WINDOWS,
    "stablelm": {},
    "starcoder2": {},
    "ministral3": {},
    "nemotron": {},
    "nanochat": {"final_logit_softcapping": 15.0},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 128,
        "block_multiple_of": 16,
    },
    "arcee": {},
    "helium": {},
    "mimo_v2_flash": {
        **WINDOWS,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "v_head_dim": 16,
    },
    "hy_v3": {**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "solar_open": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "longcat_flash": {
        **LATENT,
        "num_layers": 1,
        "num_hidden_layers": None,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "gptj": {
        "n_positions": 128,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
    },
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "expand": 2,
    },
    "phimoe": {**EXPERTS, "sliding_window": 8, "router_jitter_noise": 0.0},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "apertus": {},
    "deepseek_v4": {**LATENT, **INDEXER},
}
"""``model_type`` → settings beside ``COMMON``; null leaves a common one out."""


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""Kinds of scaled rotary positions → their settings."""


def rope_settings(kind: str) -> dict[str, Any]:
    """Settings of a family with scaled rotary positions."""
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]},
    }


def tiny_config(model_type: str, **settings: Any) -> dict[str, Any]:
    """The content of a tiny ``config.json``."""
    tree = {**COMMON, **SETTINGS[model_type], **settings}
    return {"model_type": model_type} | {
        key: value
        for key, value in tree.items()
        if value is not None or key not in COMMON
    }


def write_config(folder: Path, model_type: str, **settings: Any) -> Path:
    """Write a tiny ``config.json`` into a new folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = tiny_config(model_type, **settings)
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    return folder
