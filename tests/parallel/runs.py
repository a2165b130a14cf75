"""Small training runs for the tests of this folder, made in memory rather than from YAML."""

import copy
from typing import Any

from fsdptoys.config import Config, LaunchConfig, TrainConfig
from fsdptoys.data import SyntheticConfig
from fsdptoys.memory import MemoryConfig
from fsdptoys.mesh import MeshConfig
from fsdptoys.metrics import Console, MetricsConfig
from fsdptoys.models import LlamaConfig
from fsdptoys.optim import AdamWConfig, OptimConfig, WeightDecayOn
from fsdptoys.parallel import ParallelConfig


def tiny_model(tie_embeddings: bool = False) -> LlamaConfig:
    # Odd sizes: no dim divides evenly over 2 or 4 ranks, so that padding is always at work.
    return LlamaConfig(
        name="tiny",
        dim=36,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        ffn_dim=50,
        vocab_size=67,
        max_seq_len=64,
        tie_embeddings=tie_embeddings,
    )


def make_config(
    parallel: ParallelConfig,
    world_size: int,
    *,
    fsdp_size: int = -1,
    memory: MemoryConfig | None = None,
    optim: OptimConfig | None = None,
    tie_embeddings: bool = False,
    **train: Any,
) -> Config:
    """A validated configuration: ragged padding, clipping, AdamW, two micro-batches, deterministic mode."""
    settings = {"batch_size": 2, "seq_len": 24, "steps": 4, "grad_accum": 2, "max_grad_norm": 0.5}
    config = Config(
        model=tiny_model(tie_embeddings),
        # Validation replaces what says auto; the caller's may serve for several configurations.
        parallel=copy.copy(parallel),
        mesh=MeshConfig(fsdp_size),
        memory=memory or MemoryConfig(),
        data=SyntheticConfig(branching=4, ragged=True),
        optim=optim or AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all),
        train=TrainConfig(**{**settings, "deterministic": True, **train}),
        metrics=MetricsConfig(console=Console.none),
        launch=LaunchConfig(),
    )
    config.validate(world_size, "cpu")
    return config
