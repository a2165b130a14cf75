"""States of bfloat16 against PyTorch's AdamW with states rounded after each step, and layouts against one process."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import AdamWConfig, Implementation, OptimStateDType, WeightDecayOn, build_optimizer
from fsdptoys.optim.adamw import LARGEST_BFLOAT16_BETA
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig
from fsdptoys.utils.torchao import torchao_fault
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.parallel.groups import Pairs, Row, levels, trained_rows
from tests.parallel.runs import WITH_BLOCKS, make_config, supported

MOMENTS = ("exp_avg", "exp_avg_sq")


def run(
    state_dtype: OptimStateDType, implementation: Implementation
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Take a few steps; float32 states are rounded to bfloat16 by hand."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((70, 9), (5,))]
    config = AdamWConfig(lr=1e-2, state_dtype=state_dtype, implementation=implementation)
    named = [(f"layers.{number}", param) for number, param in enumerate(params)]
    optimizer = build_optimizer(config, named, {"layers.0"})
    for _ in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if state_dtype is OptimStateDType.float32:
            for state in optimizer.state.values():
                for name in MOMENTS:
                    state[name] = state[name].bfloat16().float()
    return params, optimizer


@pytest.mark.parametrize("implementation", list(Implementation), ids=lambda each: each.value)
def test_step_equals_float32_adamw_with_states_rounded_to_bfloat16(implementation: Implementation) -> None:
    """Oracle: torch.optim.AdamW, or VectorAdamW for its fused form on a CPU, and rounding by hand: bitwise."""
    params, optimizer = run(OptimStateDType.bfloat16, implementation)
    expected_params, oracle = run(OptimStateDType.float32, implementation)
    for param, expected in zip(params, expected_params, strict=True):
        assert torch.equal(param, expected)
        for name in MOMENTS:
            assert optimizer.state[param][name].dtype == torch.bfloat16
            assert torch.equal(optimizer.state[param][name].float(), oracle.state[expected][name])
        assert optimizer.state[param]["step"] == 5


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


OPTIONS: dict[str, Any] = {
    "optim": AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.bfloat16, weight_decay_on=WeightDecayOn.all),
    "steps": 3,
}
ROWS = supported(
    {
        "ddp": Row(DDPConfig(), 2, {}, OPTIONS),
        "fsdp1": Row(FSDP1Config(), 2, {}, OPTIONS),
        "fsdp1 flat": Row(FSDP1Config(use_orig_params=False), 2, {}, OPTIONS),
        "fsdp2": Row(FSDP2Config(), 2, {}, OPTIONS),
        "fsdp2 cpu offload": Row(FSDP2Config(), 2, {"memory": MemoryConfig(cpu_offload=True)}, OPTIONS),
        "hsdp2": Row(FSDP2Config(), 4, {"fsdp_size": 2}, OPTIONS),
    }
)
trained = trained_rows(ROWS)


@pytest.mark.parametrize("state_dtype", [kind for kind in OptimStateDType if kind is not OptimStateDType.float32])
def test_dtype_of_states_reaches_a_run(state_dtype: OptimStateDType) -> None:
    """Oracle: losses with states of float32, which differ."""
    if state_dtype is not OptimStateDType.bfloat16 and torchao_fault():
        pytest.skip(f"torchao {torchao_fault()}")
    optims = [AdamWConfig(lr=1e-2, state_dtype=kind) for kind in (state_dtype, OptimStateDType.float32)]
    configs = [make_config(SingleConfig(), 1, model=WITH_BLOCKS["llama"], optim=optim) for optim in optims]
    rounded, exact = run_ranks(1, train_all, configs)[0]
    assert rounded.losses != exact.losses


@pytest.mark.parametrize("row", levels(ROWS, {"ddp", "fsdp1", "fsdp2 cpu offload"}))
def test_bfloat16_states_match_a_single_process_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode, on real gloo ranks."""
    found, expected = trained[row]
    assert found == expected
