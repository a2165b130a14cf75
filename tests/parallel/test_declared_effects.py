"""Options are declared with their effect on bits: four ranks add gradients, default mode."""

import dataclasses

import pytest

from fsdptoys.config.declared_options import declared_options
from fsdptoys.optim import AdamWConfig
from fsdptoys.optim.adamw import OptimStateDType
from fsdptoys.optim.muon import MatmulDType, MuonConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyDDPConfig,
    ToyZero3Config,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.toys.partition import Evenness
from fsdptoys.utils.options import Effect
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, tiny_model

# Wide enough for gradients of several buckets of 1 MiB.
WIDE = dataclasses.replace(
    tiny_model(),
    dim=256,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=512,
    vocab_size=512,
)
SETTINGS = {
    "model": WIDE,
    "steps": 2,
    "deterministic": False,
    "grad_accum": 1,
    "seq_len": 16,
}

LAYOUTS: dict[str, tuple[ParallelConfig, ParallelConfig]] = {
    "parallel.bucket_cap_mb": (DDPConfig(bucket_cap_mb=1), DDPConfig()),
    "parallel.overlap": (ToyDDPConfig(overlap=False), ToyDDPConfig()),
    "parallel.evenness": (ToyZero3Config(evenness=Evenness.unit), ToyZero3Config()),
    "parallel.wrap": (FSDP1Config(wrap=Wrap.block_attn_mlp), FSDP1Config()),
    "parallel.wrap_classes": (FSDP1Config(wrap_classes=["Attention"]), FSDP1Config()),
    "parallel.min_params": (FSDP1Config(min_params=1e12), FSDP1Config()),
    "parallel.forward_prefetch": (FSDP1Config(forward_prefetch=1), FSDP1Config()),
    "parallel.use_orig_params": (FSDP1Config(use_orig_params=False), FSDP1Config()),
}
FORMATS = {
    "optim.state_dtype": (
        AdamWConfig(beta2=0.95),
        AdamWConfig(beta2=0.95, state_dtype=OptimStateDType.bfloat16),
    ),
    "optim.ns_dtype": (
        MuonConfig(ns_dtype=MatmulDType.float32),
        MuonConfig(ns_dtype=MatmulDType.bfloat16),
    ),
}


@pytest.mark.extended
def test_options_that_change_bits_are_declared_so() -> None:
    """Oracle: losses, norms and parameters of two runs that differ in the option, equal or not, and
    close."""
    configs = [
        make_config(parallel, 4, **SETTINGS)
        for pair in LAYOUTS.values()
        for parallel in pair
    ]
    configs += [
        make_config(FSDP2Config(), 4, optim=optim, **SETTINGS)
        for pair in FORMATS.values()
        for optim in pair
    ]
    runs = run_ranks(4, train_all, configs)[0]
    effects = dict.fromkeys(LAYOUTS, Effect.rounding) | dict.fromkeys(
        FORMATS, Effect.format
    )
    for key, first, second in zip(effects, runs[::2], runs[1::2], strict=True):
        expected = Effect.none if first == second else effects[key]
        assert declared_options()[key].effect is expected, key
        assert first.losses == pytest.approx(second.losses, rel=1e-4), key
