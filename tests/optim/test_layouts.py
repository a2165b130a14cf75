"""Optimizers compute the same under every layout of ranks: losses, norms and parameters of one
process, bitwise."""

from typing import Any

import pytest

from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import (
    AdamWConfig,
    MatmulDType,
    MuonConfig,
    OptimConfig,
    OptimStateDType,
    WeightDecayOn,
)
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyDDPConfig,
    ToyFSDPConfig,
)
from fsdptoys.utils.torchao import torchao_fault
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import FAMILIES, WITH_BLOCKS, supported

LAYOUTS: dict[str, tuple[ParallelConfig, int, dict[str, Any]]] = {
    "ddp": (DDPConfig(), 2, {}),
    "fsdp1": (FSDP1Config(), 2, {}),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), 2, {}),
    "fsdp2": (FSDP2Config(), 2, {}),
    "fsdp2 cpu offload": (FSDP2Config(), 2, {"memory": MemoryConfig(cpu_offload=True)}),
    "toy_fsdp": (ToyFSDPConfig(), 2, {}),
    "toy_ddp": (ToyDDPConfig(), 2, {}),
    "ddp on 4": (DDPConfig(), 4, {}),
    "fsdp2 on 4": (FSDP2Config(), 4, {}),
    "hsdp2": (FSDP2Config(), 4, {"fsdp_size": 2}),
}
OPTIMIZERS: dict[str, OptimConfig] = {
    f"muon {dtype.value}": MuonConfig(lr=1e-2, adamw_lr=3e-3, ns_dtype=dtype)
    for dtype in (MatmulDType.auto, MatmulDType.bfloat16)
} | {
    kind.value: AdamWConfig(
        lr=1e-2, state_dtype=kind, weight_decay_on=WeightDecayOn.all
    )
    for kind in OptimStateDType
}

# Odd sizes, so that shards are uneven; the three experts of qwen3_moe are sharded along another dim
# than 0 on two ranks, and matrix by matrix elsewhere. States of few bits need longer rows.
OF_MUON = ["ddp", "fsdp2", "toy_fsdp", "toy_ddp", "ddp on 4", "fsdp2 on 4", "hsdp2"]
TRIED = [
    ("llama", "muon auto", OF_MUON),
    ("qwen3_moe", "muon auto", OF_MUON),
    ("llama", "muon bfloat16", OF_MUON),
    (
        "llama",
        "bfloat16",
        ["ddp", "fsdp1", "fsdp1 flat", "fsdp2", "fsdp2 cpu offload", "hsdp2"],
    ),
    (
        "llama",
        "int8",
        ["ddp", "fsdp2", "fsdp2 cpu offload", "toy_ddp", "fsdp2 on 4", "hsdp2"],
    ),
    ("llama", "float8", ["fsdp2"]),
    ("llama", "int4", ["fsdp2", "toy_fsdp"]),
    ("qwen3_moe", "int4", ["fsdp2"]),
]
ROWS: dict[str, Row] = {}
for family, name, layouts in TRIED:
    few_bits = name in ("int8", "float8", "int4")
    if not few_bits or torchao_fault() is None:
        options = {
            "model": (WITH_BLOCKS if few_bits else FAMILIES)[family],
            "optim": OPTIMIZERS[name],
            "steps": 3,
        }
        for layout in layouts:
            ROWS[f"{family} {name} {layout}"] = Row(*LAYOUTS[layout], options)
ROWS = supported(ROWS)
SHORT = {
    *(f"qwen3_moe muon auto {layout}" for layout in ("ddp", "fsdp2", "toy_fsdp")),
    *("llama muon bfloat16 fsdp2", "llama muon auto toy_ddp", "llama muon auto hsdp2"),
    *("llama bfloat16 ddp", "llama bfloat16 fsdp1", "llama bfloat16 fsdp2 cpu offload"),
    *(
        "llama int8 ddp",
        "llama int8 fsdp2",
        "llama float8 fsdp2",
        "qwen3_moe int4 fsdp2",
        "llama int4 toy_fsdp",
    ),
}
trained = trained_rows(ROWS)


@pytest.mark.parametrize("row", levels(ROWS, SHORT & ROWS.keys()))
def test_optimizers_match_a_single_process_bitwise_under_every_layout(
    row: str, trained: Pairs
) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode, on real
    gloo ranks."""
    outcome, expected = trained[row]
    assert outcome == expected
