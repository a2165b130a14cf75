"""Small models of torchtitan's families, and their checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdptoys.cli.convert import convert_command
from fsdptoys.errors import ConfigError
from fsdptoys.models import LlamaConfig, Qwen3Config, Qwen3MoEConfig, RotaryConfig
from fsdptoys.models.rope_scaling import RopeScaling
from tests.harness.titan import Titan

SIZES: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 112,
    "vocab_size": 97,
    "max_seq_len": 512,
}
LLAMA = LlamaConfig(
    **SIZES,
    name="llama_debug",
    rope_theta=500.0,
    rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=16),
)
QWEN3 = Qwen3Config(**SIZES, name="qwen3_debug", head_dim=32)
TIED = dataclasses.replace(QWEN3, tie_embeddings=True)
MOE = Qwen3MoEConfig(
    **SIZES,
    name="qwen3_moe_debug",
    head_dim=32,
    n_experts=4,
    top_k=2,
    expert_ffn_dim=40,
)


def overrides_of(config: RotaryConfig) -> list[str]:
    """The words that choose the model."""
    keys = (
        *("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"),
        *("head_dim", "rope_theta", "tie_embeddings"),
        *("n_experts", "top_k", "expert_ffn_dim"),
    )
    chosen = [
        f"model.{key}={str(getattr(config, key)).lower().replace('none', 'null')}"
        for key in keys
        if hasattr(config, key)
    ]
    scaling = config.rope_scaling
    chosen += [
        f"model.rope_scaling.factor={scaling.factor}",
        f"model.rope_scaling.original_max_seq_len={scaling.original_max_seq_len}",
    ]
    return [f"model={config.name}", *chosen]


def titan_state(config: RotaryConfig, version: str = "0.2") -> dict[str, Tensor]:
    model = Titan(config, version)
    model.draw()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def save_alone(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


def refusal(folder: Path, *options: str) -> str:
    """The sentence that refuses a folder, with its path as {}."""
    out = folder.parent / "out"
    with pytest.raises(ConfigError) as refused:
        convert_command(["from-dcp", str(folder), str(out), *options])
    message = str(refused.value)
    assert "\n" not in message and not out.exists()
    return message.replace(str(folder), "{}")
