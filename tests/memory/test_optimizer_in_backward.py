"""Optimizer steps in the backward against the ordinary ones, and the gradients that they free."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig, OptimizerInBackward
from fsdptoys.models import ModelConfig
from fsdptoys.optim import AdamWConfig, Implementation, OptimStateDType, SGDConfig, WeightDecayOn
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, WITH_BLOCKS, make_config, supported, tiny_model


def config(parallel: ParallelConfig, ranks: int, in_backward: bool, **options: Any) -> Config:
    memory = replace(options.pop("memory", MemoryConfig()), optimizer_in_backward=in_backward)
    common = {"max_grad_norm": None, "skip_nonfinite": False, "grad_accum": 1}
    return make_config(parallel, ranks, memory=memory, **{**common, **options})


def rows(ranks: int) -> dict[str, tuple[ParallelConfig, dict[str, Any]]]:
    half, decays = DType.bfloat16, {"weight_decay_on": WeightDecayOn.all}
    parallel: ParallelConfig = SingleConfig() if ranks == 1 else FSDP2Config()
    int8 = {"optim": AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.int8), "model": WITH_BLOCKS["qwen3_moe"]}
    rows: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
        "adamw, tied": (parallel, {"tie_embeddings": True}),
        "not deterministic": (parallel, {"deterministic": False}),
        "foreach": (parallel, {"optim": AdamWConfig(implementation=Implementation.foreach, **decays)}),
        "sgd": (parallel, {"optim": SGDConfig(lr=0.1, **decays), "model": TINY["gpt2"]}),
        "states of bfloat16": (parallel, {"optim": AdamWConfig(state_dtype=OptimStateDType.bfloat16, **decays)}),
        "states of int8": (parallel, int8),
        "bfloat16": (replace(parallel, param_dtype=half), {"model": TINY["qwen3_moe"]}),
        "checkpointing, chunked loss": (
            parallel,
            {"memory": MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True)},
        ),
    }
    return supported({**rows, "fsdp2 alone": (FSDP2Config(), {})} if ranks == 1 else rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_in_backward_equals_the_ordinary_step_bitwise(ranks: int) -> None:
    """Oracle: the same strategy without: losses, gradient norms and parameters."""
    configs = [
        config(parallel, ranks, in_backward, **options)
        for parallel, options in rows(ranks).values()
        for in_backward in (False, True)
    ]
    outcomes = run_ranks(ranks, train_all, configs)[0]
    pairs = dict(zip(rows(ranks), zip(outcomes[::2], outcomes[1::2], strict=True), strict=True))
    assert [name for name, (ordinary, in_backward) in pairs.items() if ordinary != in_backward] == []


def built(model: ModelConfig) -> list[nn.Parameter]:
    with torch.device("meta"):
        return list(model.build().parameters())


def test_gradients_of_several_simulated_ranks_are_refused() -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as caught:
        config(SingleConfig(simulated_ranks=2), 1, True)
    assert str(caught.value) == (
        "memory.optimizer_in_backward=true frees gradients as they come, and parallel=single adds them up with "
        "parallel.simulated_ranks=2; set parallel=fsdp2 or memory.optimizer_in_backward=false"
    )


def counting(function: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        count()
        return function(*args)

    return call


def peak_and_gradients(configs: list[Config]) -> list[tuple[int, int, int]]:
    """For each run: bytes at the peak of a step over those before it, most live gradients, and all parameters.

    The smallest of four steps counts: gloo's thread may hold a buffer for longer than the collective takes. A sleep of
    2 ms after each gradient lets it run on a busy machine.
    """
    measured = []
    for each in configs:
        most = 0
        with pytest.MonkeyPatch.context() as patch:
            for kind in (OptimizerInBackward, Trainer):
                patch.setattr(kind, "_update", counting(kind._update, lambda: count()))
            made = Trainer(each)
            params = [param for _, param in made.strategy.named_parameters()]

            def count(params: list[nn.Parameter] = params) -> None:
                nonlocal most
                most = max(most, sum(param.grad is not None for param in params))
                time.sleep(0.002)

            made._train_step(1, 0.0)
            peaks = [peak_of(functools.partial(made._train_step, step, 0.0)) for step in range(2, 22)]
        measured.append((min(peaks), most, len(params)))
    return measured


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes at the peak of PyTorch's allocator, over those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    live = peak = 0
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_in_backward_frees_gradients_early(ranks: int) -> None:
    """Oracle: bytes from PyTorch's allocator in one step, with and without; gradients are 4 bytes an element."""
    parallel: ParallelConfig = SingleConfig() if ranks == 1 else FSDP2Config()
    model = replace(tiny_model(), dim=96, ffn_dim=256, n_layers=16)
    options: dict[str, Any] = {"model": model, "seq_len": 4, "batch_size": 1, "deterministic": False}
    configs = [config(parallel, ranks, in_backward, **options) for in_backward in (False, True)]
    (ordinary, most, params), (freeing, few, _) = run_ranks(ranks, peak_and_gradients, configs)[0]
    gradient_bytes = 4 * sum(param.numel() for param in built(model)) // ranks
    assert most == params
    assert few == 1
    # Less than all: FSDP2 keeps the gradients of a block in one storage (0.74 of the bytes where no buffer is held).
    assert ordinary - freeing > 0.7 * gradient_bytes
