"""Gradient checkpointing and compilation under the strategies: no more gathers than PyTorch's own
wrapper, one graph.

``test_equality.py`` compares the bits of checkpointed runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyFSDPConfig,
    ToyZero1Config,
    ToyZero3Config,
)
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import TORCH, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train import parallelize as prepare_module
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.torchao import torchao_fault
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import levels
from tests.harness.tiny import TINY, WITH_BLOCKS, make_config
from tests.parallel.collective_counts import GATHER, LAYERS, second_step

FULL = GradientCheckpointing.full
SELECTIVE = GradientCheckpointing.selective
PARTS = Wrap.block_attn_mlp
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"gradient_checkpointing": FULL},
    "selective": {"gradient_checkpointing": SELECTIVE},
    "full, offload": {"gradient_checkpointing": FULL, "activation_offload": True},
    "selective, offload": {
        "gradient_checkpointing": SELECTIVE,
        "activation_offload": True,
    },
    "full, every 2": {"gradient_checkpointing": FULL, "checkpointing_every": 2},
}


class _Forward(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def with_pytorchs_wrapper(config: Config, every: int) -> Config:
    """Install PyTorch's own wrapper as every N-th block's forward: strategies look for the block
    itself."""
    build = config.model.build

    def build_wrapped() -> Any:
        model = build()
        for block in list(model.layers)[::every]:
            block.forward = checkpoint_wrapper(
                _Forward(block.forward), CheckpointImpl.NO_REENTRANT
            ).forward
        return model

    config.model.build = build_wrapped  # type: ignore[method-assign]
    return config


UNITS = {
    "fsdp1 blocks": FSDP1Config(wrap=Wrap.block),
    "fsdp1 parts": FSDP1Config(wrap=PARTS),
    "fsdp2 blocks": FSDP2Config(wrap=Wrap.block),
    "fsdp2 parts": FSDP2Config(wrap=PARTS),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", levels(UNITS, {"fsdp1 parts", "fsdp2 blocks"}))
def test_checkpointing_gathers_no_more_than_the_pytorch_wrapper(name: str) -> None:
    """Oracle: the all-gathers of a step without checkpointing, and with PyTorch's wrapper around
    the same blocks."""

    def config(**memory: Any) -> Config:
        options = {"deterministic": False, "steps": 1, "grad_accum": 1}
        return make_config(UNITS[name], 2, memory=MemoryConfig(**memory), **options)

    configs = {way: config(**memory) for way, memory in WAYS.items()}
    configs |= {
        f"PyTorch's {every}": with_pytorchs_wrapper(config(), every) for every in (1, 2)
    }
    events = run_ranks(2, second_step, list(configs.values()))[0]
    gathers = {
        way: of_way.count(GATHER) for way, of_way in zip(configs, events, strict=True)
    }
    assert gathers["full, every 2"] == gathers["PyTorch's 2"]
    for way in ("full", "selective", "full, offload", "selective, offload"):
        assert gathers[way] == gathers["PyTorch's 1"], way
    # FSDP1 gathers one of a block's two inner units once more in the recomputation, with any
    # checkpointing. FSDP2 does not from some torch between 2.8 and 2.11 on.
    again = 1 if name == "fsdp1 parts" else 0
    if TORCH >= (2, 11) or name != "fsdp2 parts":
        assert gathers["full"] - gathers["none"] == LAYERS * again
        assert gathers["full, every 2"] - gathers["none"] == 2 * again


COMPILED: dict[str, ParallelConfig] = {
    "fsdp2": FSDP2Config(),
    **({"fsdp2 float8": FSDP2Config()} if torchao_fault() is None else {}),
    "fsdp1": FSDP1Config(),
    "fsdp1 parts": FSDP1Config(wrap=PARTS),
    "toy_zero3": ToyZero3Config(),
    "toy_fsdp parts": ToyFSDPConfig(wrap=PARTS),
    "ddp cast": DDPConfig(param_dtype=DType.bfloat16),
    "toy_zero1 cast": ToyZero1Config(param_dtype=DType.bfloat16),
}
COMPILED_WAYS = {
    "budget": MemoryConfig(checkpointing_budget=0.0),
    "full": MemoryConfig(gradient_checkpointing=FULL),
}


def train(configs: list[Config]) -> list[tuple[list[tuple[float, float]], int]]:
    """Return losses and norms, and the number of compiled graphs, of each run; no machine code is
    generated."""
    backend = functools.partial(compile_blocks, backend="aot_eager_decomp_partition")
    prepare_module.compile_blocks = backend  # type: ignore[attr-defined]
    results = []
    for config in configs:
        torch._dynamo.reset()
        counters.clear()
        trainer = Trainer(config)
        trainer.train()
        history = [(step.loss, step.grad_norm) for step in trainer.history]
        results.append((history, counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("way", levels(COMPILED_WAYS, {"full"}))
@pytest.mark.parametrize("name", levels(COMPILED, {"fsdp2"}))
def test_compiled_blocks_match_eager_ones_with_one_compilation(
    name: str, way: str
) -> None:
    """Oracle: blocks in eager mode, losses to 1e-6 relative, or to bfloat16's precision; graphs
    counted by Dynamo."""
    parallel = COMPILED[name]
    options: dict[str, Any] = {
        "model": TINY["qwen3"],
        "deterministic": False,
        "steps": 2,
    }
    if name == "fsdp2 float8":
        options |= {"model": WITH_BLOCKS["llama"], "float8_all_gather": True}
        options["float8"] = Float8.tensorwise
    compiled = make_config(
        parallel, 2, memory=COMPILED_WAYS[way], compile=True, **options
    )
    (expected, _), (history, graphs) = run_ranks(
        2, train, [make_config(parallel, 2, **options), compiled]
    )[0]
    rel = 1e-6 if parallel.param_dtype is DType.float32 else 2e-3
    rel = 1e-5 if "float8" in options else rel
    # Hooks on parts of a block break its graph.
    assert graphs > 1 if name.endswith("parts") else graphs == 1
    assert history == [pytest.approx(step, rel=rel) for step in expected]
