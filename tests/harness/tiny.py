"""Small training runs, built in memory rather than from YAML."""

import copy
import dataclasses
from typing import Any, TypeVar

import pytest

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.kernel_choice import (
    AttentionKernel,
    GroupedKernel,
    Kernel,
    KernelConfig,
)
from fsdptoys.config.launch_config import DeviceChoice, LaunchConfig
from fsdptoys.config.plan_config import PlanConfig
from fsdptoys.config.schema import Config
from fsdptoys.config.train_config import TrainConfig
from fsdptoys.data import DataConfig
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.loss import CrossEntropyConfig, LossConfig
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics import Console, MetricsConfig
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
from fsdptoys.optim import AdamWConfig, OptimConfig, WeightDecayOn
from fsdptoys.parallel import FSDP2Config, ParallelConfig
from fsdptoys.parallel.fsdp import TORCH, Wrap
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.tune import FullConfig, TuneConfig
from fsdptoys.utils.torchao import torchao_fault

PLAIN_KERNELS = KernelConfig(
    attention=AttentionKernel.torch,
    rms_norm=Kernel.torch,
    rotary=Kernel.torch,
    swiglu=Kernel.torch,
    grouped_matmul=GroupedKernel.looped,
)
"""Ops that every device has, with the same arithmetic on all of them; simulated NPUs lack
torch_npu's."""


Row = TypeVar("Row")


def supported(rows: dict[str, Row]) -> dict[str, Row]:
    """Leave out the rows with a label that names a feature that this torch lacks."""
    # FSDP2 replicates on a CPU from 2.8 on
    lacks = {
        "int8": torchao_fault() is not None,
        "hsdp2": TORCH < (2, 8),
    }
    lacks["fsdp2, quantized"] = not FSDP2Config.capabilities.mixed_dtypes
    return {
        label: row
        for label, row in rows.items()
        if not any(lacks[name] and name in label for name in lacks)
    }


# Odd sizes: no dim divides evenly over 2 or 4 ranks, so all shards are padded.
GPT2_SIZES: dict[str, Any] = {
    "name": "tiny",
    "dim": 36,
    "n_heads": 6,
    "vocab_size": 67,
    "max_seq_len": 64,
}
SIZES = GPT2_SIZES | {"n_kv_heads": 2, "ffn_dim": 50}
HEADS = SIZES | {"head_dim": 10}


def tiny_model(tie_embeddings: bool = False) -> LlamaConfig:
    return LlamaConfig(**SIZES, n_layers=3, tie_embeddings=tie_embeddings)


TINY: dict[str, ModelConfig] = {
    "mistral": MistralConfig(
        **HEADS,
        n_layers=2,
        rope_scaling=RopeScaling(
            factor=4.0, original_max_seq_len=12, kind=RopeKind.yarn
        ),
    ),
    "qwen2": Qwen2Config(**SIZES, n_layers=2, tie_embeddings=True),
    "qwen3": Qwen3Config(**HEADS, n_layers=2),
    # Two or four ranks do not divide the experts: their stacks are sharded along another dim.
    "qwen3_moe": Qwen3MoEConfig(
        **HEADS,
        n_layers=2,
        n_experts=3,
        top_k=2,
        expert_ffn_dim=22,
        router_aux_loss_coef=0.05,
        router_z_loss_coef=0.01,
    ),
    "llama4": Llama4Config(
        **HEADS,
        n_layers=4,
        n_experts=5,
        expert_ffn_dim=22,
        moe_every=2,
        attention_chunk_len=10,
        temperature_floor=7,
        router_aux_loss_coef=0.05,
    ),
    "gpt2": GPT2Config(**GPT2_SIZES, n_layers=2),
}
"""The other families, at the same size."""

FAMILIES: dict[str, ModelConfig] = {"llama": tiny_model(), **TINY}
EXPERTS: dict[str, Any] = {"n_experts": 4, "expert_ffn_dim": 24}
"""Experts that two and four ranks divide."""
EVEN: dict[str, Any] = {
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 52,
    "vocab_size": 68,
    "dim": 40,
}
"""Sizes that two ranks divide; shards of what is left are still padded."""
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)

WRAPS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "parts": {"wrap": Wrap.block_attn_mlp},
    "classes": {"wrap_classes": ["Attention", "SwiGLU"]},
    "size": {"min_params": 1500},
}
"""Ways to choose the units of a tiny Llama."""


def with_sizes(model: ModelConfig, **sizes: Any) -> Any:
    """Return the model with those of the sizes that its family has."""
    field_names = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(
        model, **{name: size for name, size in sizes.items() if name in field_names}
    )


WITH_BLOCKS: dict[str, ModelConfig] = {
    # The experts' stacks are three, which two or four ranks shard along another dim.
    name: with_sizes(
        FAMILIES[name],
        dim=64,
        n_layers=1,
        n_heads=4,
        ffn_dim=96,
        head_dim=16,
        expert_ffn_dim=32,
    )
    for name in ("llama", "qwen3_moe")
}
"""Models with rows long enough for optimizer states of 8 and 4 bits."""


def make_config(
    parallel: ParallelConfig,
    world_size: int,
    *,
    fsdp_size: int = -1,
    cp_size: int = 1,
    ep_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    memory: MemoryConfig | None = None,
    optim: OptimConfig | None = None,
    tune: TuneConfig | None = None,
    tie_embeddings: bool = False,
    model: ModelConfig | None = None,
    kernels: KernelConfig | None = None,
    device: str = "cpu",
    data: DataConfig | None = None,
    loss: LossConfig | None = None,
    **train: Any,
) -> Config:
    """A validated configuration: ragged padding, clipping, AdamW, two micro-batches, deterministic
    mode."""
    settings = {
        "batch_size": 2,
        "seq_len": 24,
        "steps": 4,
        "grad_accum": 2,
        "max_grad_norm": 0.5,
    }
    settings |= {"eval_every": 0}
    config = Config(
        model=model or tiny_model(tie_embeddings),
        # Validation replaces auto values in place; the caller may use its objects for several
        # configurations.
        parallel=copy.copy(parallel),
        mesh=MeshConfig(fsdp_size, cp_size, ep_size, tp_size, pp_size),
        memory=copy.copy(memory) if memory else MemoryConfig(),
        data=data or SyntheticConfig(branching=4, ragged=True),
        optim=copy.copy(optim)
        if optim
        else AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all),
        tune=tune or FullConfig(),
        train=TrainConfig(**{**settings, "deterministic": True, **train}),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(console=Console.none),
        profile=ProfileConfig(),
        debug=DebugConfig(),
        launch=LaunchConfig(device=DeviceChoice(device)),
        plan=PlanConfig(),
        kernels=copy.copy(
            kernels or (PLAIN_KERNELS if device == "npu" else KernelConfig())
        ),
        loss=loss or CrossEntropyConfig(),
    )
    config.validate(world_size, device)
    return config


def refusal(parallel: ParallelConfig, ranks: int, **options: Any) -> str:
    """Return the sentence with which ``make_config`` refuses the configuration."""
    with pytest.raises(ConfigError) as refused:
        make_config(parallel, ranks, **options)
    return str(refused.value)
