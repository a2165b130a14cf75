"""States of bfloat16 against PyTorch's AdamW with states rounded after each step, and layouts against one process."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    OptimStateDType,
    WeightDecayOn,
    build_optimizer,
)
from fsdptoys.optim.adamw import LARGEST_BFLOAT16_BETA
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.fsdp import TORCH
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config

MOMENTS = ("exp_avg", "exp_avg_sq")


def run(kept: OptimStateDType, implementation: Implementation) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Take a few steps; float32 states are rounded to bfloat16 by hand."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((70, 9), (5,))]
    config = AdamWConfig(lr=1e-2, state_dtype=kept, implementation=implementation)
    named = [(f"layers.{number}", param) for number, param in enumerate(params)]
    optimizer = build_optimizer(config, named, {"layers.0"})
    for _ in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if kept is OptimStateDType.float32:
            for state in optimizer.state.values():
                for name in MOMENTS:
                    state[name] = state[name].bfloat16().float()
    return params, optimizer


@pytest.mark.parametrize("implementation", list(Implementation), ids=lambda each: each.value)
def test_step_equals_float32_adamw_with_states_rounded_to_bfloat16(implementation: Implementation) -> None:
    """Oracle: torch.optim.AdamW, or VectorAdamW for its fused form on a CPU, and rounding by hand: bitwise."""
    (mine, kept), (theirs, wanted) = (
        run(dtype, implementation) for dtype in (OptimStateDType.bfloat16, OptimStateDType.float32)
    )
    for param, expected in zip(mine, theirs, strict=True):
        assert torch.equal(param, expected)
        for name in MOMENTS:
            assert kept.state[param][name].dtype == torch.bfloat16
            assert torch.equal(kept.state[param][name].float(), wanted.state[expected][name])
        assert kept.state[param]["step"] == 5


def test_loading_keeps_states_in_bfloat16() -> None:
    """Oracle: the states before; PyTorch's own loading makes float32 of them."""
    _, optimizer = run(OptimStateDType.bfloat16, Implementation.foreach)
    before = {name: [state[name].clone() for state in optimizer.state.values()] for name in MOMENTS}
    optimizer.load_state_dict(optimizer.state_dict())
    for name in MOMENTS:
        for state, expected in zip(optimizer.state.values(), before[name], strict=True):
            assert state[name].dtype == torch.bfloat16 and torch.equal(state[name], expected)


@pytest.mark.parametrize(("beta", "falls"), [(LARGEST_BFLOAT16_BETA, True), (0.95, True), (0.997, False)])
def test_accepted_betas_let_bfloat16_moments_decay(beta: float, falls: bool) -> None:
    """Oracle: every bfloat16 between 1 and 2, multiplied and rounded."""
    means = 1 + torch.arange(128) / 128
    assert bool(((means * beta).bfloat16().float() < means).all()) == falls


LAYOUTS: dict[str, tuple[ParallelConfig, int, int, dict[str, Any]]] = {
    "ddp": (DDPConfig(), 2, -1, {}),
    "fsdp1": (FSDP1Config(), 2, -1, {}),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), 2, -1, {}),
    "fsdp2": (FSDP2Config(), 2, -1, {}),
    "fsdp2 cpu offload": (FSDP2Config(), 2, -1, {"memory": MemoryConfig(cpu_offload=True)}),
    "hsdp2": (FSDP2Config(), 4, 2, {}),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bfloat16_states_match_a_single_process_bitwise(ranks: int) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode, on real gloo ranks."""
    options: dict[str, Any] = {
        "optim": AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.bfloat16, weight_decay_on=WeightDecayOn.all),
        "steps": 3,
    }
    rows = {name: row for name, row in LAYOUTS.items() if row[1] == ranks and (name != "hsdp2" or TORCH >= (2, 8))}
    configs = [make_config(way, ranks, fsdp_size=size, **more, **options) for way, _, size, more in rows.values()]
    outcomes = dict(zip(rows, run_ranks(ranks, train_all, configs)[0], strict=True))
    alone = make_config(SingleConfig(simulated_ranks=ranks), 1, **options)
    plain = make_config(SingleConfig(simulated_ranks=ranks), 1, **{**options, "optim": AdamWConfig(lr=1e-2)})
    reference, unrounded = run_ranks(1, train_all, [alone, plain])[0]
    assert {name: outcome for name, outcome in outcomes.items() if outcome != reference} == {}
    assert reference.losses != unrounded.losses
