"""Gradient checkpointing under the strategies: no more gathers than PyTorch's own, and unchanged bits."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdptoys.config.schema import Config
from fsdptoys.memory.activation_checkpointing import GradientCheckpointing, checkpoint_blocks
from fsdptoys.memory.activation_offload import ActivationOffload
from fsdptoys.models import DecoderModel
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyFSDPConfig,
    ToyZero1Config,
    ToyZero3Config,
)
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config
from tests.parallel.test_collectives import GATHER, LAYERS, count, second_step

NONE, FULL, SELECTIVE = GradientCheckpointing
Prepare = Callable[[nn.ModuleList], None]


def ours(mode: GradientCheckpointing, offload: bool = False, **options: Any) -> Prepare:
    """``checkpoint_blocks`` with a separate offload for each model."""

    def prepare(blocks: nn.ModuleList) -> None:
        host = ActivationOffload(torch.device("cpu"), min_bytes=0) if offload else None
        checkpoint_blocks(blocks, mode, offload=host, **options)

    return prepare


def pytorchs(blocks: nn.ModuleList, every: int = 1) -> None:
    """PyTorch's own wrapper, installed as a block's forward: strategies look for the block itself."""
    for block in list(blocks)[::every]:
        inner = _Forward(block.forward)
        block.forward = checkpoint_wrapper(inner, CheckpointImpl.NO_REENTRANT).forward


class _Forward(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def configs_of(
    parallel: ParallelConfig, prepares: list[Prepare], world_size: int = 2, model: str | None = None, **train: Any
) -> list[Config]:
    """One configuration for each way to prepare the blocks of an otherwise equal model."""
    configs = []
    for prepare in prepares:
        family = copy.copy(TINY[model]) if model else None
        config = make_config(parallel, world_size, model=family, **train)
        config.model.build = functools.partial(_build, config.model.build, prepare)  # type: ignore[method-assign]
        configs.append(config)
    return configs


def _build(build: Callable[[], DecoderModel], prepare: Prepare) -> DecoderModel:
    model = build()
    prepare(model.layers)
    return model


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("wrap", [Wrap.block, Wrap.block_attn_mlp], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("config", [FSDP1Config, FSDP2Config])
def test_checkpointing_gathers_no_more_than_the_pytorch_wrapper(
    config: type[FSDP1Config] | type[FSDP2Config], wrap: Wrap
) -> None:
    """Oracle: the all-gathers of a step without checkpointing, and with PyTorch's wrapper around the same blocks."""
    ways = {
        "none": ours(NONE),
        "full": ours(FULL),
        "selective": ours(SELECTIVE),
        "full, every 2": ours(FULL, every=2),
        "full, offload": ours(FULL, offload=True),
        "selective, offload": ours(SELECTIVE, offload=True),
        "PyTorch's": pytorchs,
        "PyTorch's, every 2": functools.partial(pytorchs, every=2),
    }
    configs = configs_of(config(wrap=wrap), list(ways.values()), deterministic=False, steps=1, grad_accum=1)
    events = run_ranks(2, second_step, configs)[0]
    gathers = {way: count(of_way, GATHER) for way, of_way in zip(ways, events, strict=True)}
    for way in ("full", "selective", "full, offload", "selective, offload"):
        assert gathers[way] == gathers["PyTorch's"], way
    assert gathers["full, every 2"] == gathers["PyTorch's, every 2"]
    # FSDP1 gathers one of a block's two inner units once more in the recomputation, with any checkpointing. FSDP2
    # does not from some torch between 2.8 and 2.11 on.
    again = 1 if config is FSDP1Config and wrap is Wrap.block_attn_mlp else 0
    if TORCH >= (2, 11) or wrap is Wrap.block:
        assert gathers["full"] - gathers["none"] == LAYERS * again
        assert gathers["full, every 2"] - gathers["none"] == 2 * again


def train(configs: list[Config]) -> list[tuple[list[tuple[float, float]], dict[str, bytes], int]]:
    """Losses, norms, the bits of the trained parameters, and the number of compiled graphs, for each configuration."""
    results = []
    for config in configs:
        torch._dynamo.reset()
        counters.clear()
        trainer = Trainer(config)
        trainer.train()
        history = [(step.loss, step.grad_norm) for step in trainer.history]
        parameters = {name: param.numpy().tobytes() for name, param in trainer.strategy.full_parameters()}
        results.append((history, parameters, counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("parallel", "world_size", "fsdp_size", "model"),
    [
        (FSDP2Config(wrap=Wrap.block_attn_mlp, forward_prefetch=1), 2, -1, "qwen3_moe"),
        (FSDP2Config(param_dtype=DType.bfloat16, reshard_after_forward=ReshardAfterForward.never), 2, -1, "gpt2"),
        pytest.param(
            *(FSDP2Config(), 4, 2, "qwen3"),
            marks=pytest.mark.skipif(TORCH < (2, 8), reason="FSDP2 replicates on a CPU from torch 2.8 on"),
        ),
        (FSDP1Config(wrap=Wrap.block_attn_mlp), 2, -1, "llama4"),
        (FSDP1Config(param_dtype=DType.bfloat16, use_orig_params=False), 2, -1, "qwen3_moe"),
        (DDPConfig(), 2, -1, "qwen3_moe"),
    ],
    ids=["fsdp2 parts", "fsdp2 bf16", "hsdp", "fsdp1 parts", "fsdp1 bf16 flat", "ddp"],
)
def test_checkpointed_training_is_bitwise_equal(
    parallel: ParallelConfig, world_size: int, fsdp_size: int, model: str
) -> None:
    """Oracle: the same strategy without it: losses, norms and parameters after two steps of two micro-batches."""
    ways = [ours(NONE), ours(FULL, every=2, offload=True), ours(SELECTIVE), ours(SELECTIVE, offload=True)]
    configs = configs_of(parallel, ways, world_size, model, fsdp_size=fsdp_size, steps=2)
    (history, parameters, _), *others = run_ranks(world_size, train, configs)[0]
    for other_history, other_parameters, _ in others:
        assert other_history == history
        for name, bits in parameters.items():
            assert other_parameters[name] == bits, name


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "parallel",
    [
        FSDP2Config(),
        FSDP1Config(),
        FSDP1Config(wrap=Wrap.block_attn_mlp),
        ToyZero3Config(),
        ToyFSDPConfig(wrap=Wrap.block_attn_mlp),
        DDPConfig(param_dtype=DType.bfloat16),
        ToyZero1Config(param_dtype=DType.bfloat16),
    ],
    ids=["fsdp2", "fsdp1", "fsdp1 parts", "toy_zero3", "toy_fsdp parts", "ddp cast", "toy_zero1 cast"],
)
def test_compiled_blocks_match_eager_ones_with_one_compilation(parallel: ParallelConfig) -> None:
    """Oracle: the same strategy with blocks in eager mode, losses to 1e-6 relative, or to bfloat16's precision in
    bfloat16; graphs counted by Dynamo.
    """
    rel = 1e-6 if parallel.param_dtype is DType.float32 else 2e-3
    inner = getattr(parallel, "wrap", Wrap.block) is Wrap.block_attn_mlp

    def compiled(blocks: nn.ModuleList, mode: GradientCheckpointing, budget: float | None) -> None:
        checkpoint_blocks(blocks, mode)
        compile_blocks(blocks, budget, inner_hooks=inner, backend="aot_eager_decomp_partition")

    ways = [ours(NONE)] + [
        functools.partial(compiled, mode=mode, budget=budget) for mode, budget in ((NONE, 0.0), (FULL, None))
    ]
    configs = configs_of(parallel, ways, model="qwen3", deterministic=False, steps=2)
    (expected, _, _), *others = run_ranks(2, train, configs)[0]
    for history, _, graphs in others:
        assert graphs > 1 if inner else graphs == 1  # hooks on parts of a block break its graph
        assert history == [pytest.approx(step, rel=rel) for step in expected]
