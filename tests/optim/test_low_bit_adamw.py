"""States of 16, 8 and 4 bits against PyTorch's and torchao's own optimizers."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.optim import AdamWConfig, Implementation, OptimStateDType, build_optimizer
from fsdptoys.optim.adamw import LARGEST_BFLOAT16_BETA
from fsdptoys.utils.torchao import torchao_fault

fault = torchao_fault()
needs_torchao = pytest.mark.skipif(fault is not None, reason=f"torchao {fault}")

LOW_BITS = [OptimStateDType.int8, OptimStateDType.float8, OptimStateDType.int4]
SHAPES = {
    "layers.0": (20, 256),
    "layers.1": (512, 32),
    "layers.2": (16, 8),
    "layers.3": (4100,),
}
"""Rows of full blocks, of smaller ones, of none, and a vector: the first two have low-bit
states."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_params(names: Iterable[str] = SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(SHAPES[name], generator=generator))
        for name in names
    }


def take_steps(
    optimizers: list[torch.optim.Optimizer],
    params: dict[str, nn.Parameter],
    rounds: bool = False,
) -> None:
    """Take a few steps; states may be rounded to bfloat16 after each."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
            for state in optimizer.state.values() if rounds else ():
                state |= {name: state[name].bfloat16().float() for name in MOMENTS}


def train(
    state_dtype: OptimStateDType,
    implementation: Implementation,
    names: Iterable[str] = SHAPES,
    rounds: bool = False,
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Parameters and optimizer after a few steps."""
    params = make_params(names)
    config = AdamWConfig(
        lr=1e-2, state_dtype=state_dtype, implementation=implementation
    )
    optimizer = build_optimizer(
        config, params.items(), {name for name in params if name != "layers.3"}
    )
    take_steps([optimizer], params, rounds)
    return params, optimizer


@needs_torchao
@pytest.mark.parametrize("state_dtype", LOW_BITS, ids=lambda option: option.value)
def test_matrices_match_torchao_and_other_parameters_match_pytorch(
    state_dtype: OptimStateDType,
) -> None:
    """Oracle: torchao's optimizers, uncompiled, with the same blocks, and torch.optim.AdamW:
    bitwise."""
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    mine, optimizer = train(state_dtype, Implementation.for_loop)
    kind = {
        OptimStateDType.int8: AdamW8bit,
        OptimStateDType.float8: AdamWFp8,
        OptimStateDType.int4: AdamW4bit,
    }[state_dtype]
    largest = 128 if state_dtype is OptimStateDType.int4 else 256
    oracle_params = make_params()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizers = {
        "layers.0": kind(
            [oracle_params["layers.0"]], weight_decay=0.1, block_size=largest, **options
        ),
        "layers.1": kind(
            [oracle_params["layers.1"]], weight_decay=0.1, block_size=32, **options
        ),
        "layers.2": torch.optim.AdamW(
            [oracle_params["layers.2"]], weight_decay=0.1, foreach=False, **options
        ),
        "layers.3": torch.optim.AdamW(
            [oracle_params["layers.3"]], weight_decay=0.0, foreach=False, **options
        ),
    }
    with torch.compiler.set_stance("force_eager"):
        take_steps(list(optimizers.values()), oracle_params)
    for name, param in mine.items():
        assert torch.equal(param, oracle_params[name]), name
        state = optimizer.state[param]
        expected = optimizers[name].state[oracle_params[name]]
        assert state["step"] == expected["step"] == 4
        for mean in ("exp_avg", "exp_avg_sq"):
            if name in ("layers.0", "layers.1"):
                codes = state[f"{mean}_codes"]
                scales = state[f"{mean}_scales"]
                assert torch.equal(
                    codes.view(-1), expected[mean].codes.view(torch.uint8).view(-1)
                )
                assert torch.equal(scales.view(-1), expected[mean].scale)
            else:
                assert torch.equal(state[mean], expected[mean])


@needs_torchao
def test_compiled_step_equals_the_eager_step_up_to_rounding() -> None:
    """Oracle: the uncompiled one; a step is about the learning rate, 1e-2."""
    names = ("layers.0", "layers.3")
    implementations = (Implementation.fused, Implementation.for_loop)
    (compiled, _), (plain, _) = (
        train(OptimStateDType.float8, option, names) for option in implementations
    )
    start = make_params(names)
    for name, param in compiled.items():
        assert (param - start[name]).abs().max() > 1e-2
        # A moment near the middle between two codes may round to either: a few elements.
        far = (param - plain[name]).abs() > 1e-5
        assert far.float().mean() < 1e-3


@pytest.mark.parametrize(
    "state_dtype",
    [
        OptimStateDType.bfloat16,
        *(pytest.param(state_dtype, marks=needs_torchao) for state_dtype in LOW_BITS),
    ],
    ids=lambda option: option.value,
)
def test_state_bytes_follow_the_formula_and_survive_loading(
    state_dtype: OptimStateDType,
) -> None:
    """Oracle: bytes of the tensors; the states before. PyTorch's own loading makes float32 of
    them."""
    params, optimizer = train(state_dtype, Implementation.for_loop)
    config = AdamWConfig(state_dtype=state_dtype)
    before = {param: dict(optimizer.state[param]) for param in params.values()}
    optimizer.load_state_dict(optimizer.state_dict())
    for name, param in params.items():
        states = {
            key: state for key, state in optimizer.state[param].items() if key != "step"
        }
        assert tuple(state.nbytes for state in states.values()) == config.state_bytes(
            param.shape, param.numel(), False
        )
        few_bits = state_dtype in LOW_BITS and name in ("layers.0", "layers.1")
        assert (
            sum(state.nbytes for state in states.values()) < 8 * param.numel() / 3
        ) == few_bits
        for key, state in states.items():
            assert state.dtype == before[param][key].dtype and torch.equal(
                state, before[param][key]
            )


@pytest.mark.parametrize(
    "implementation", list(Implementation), ids=lambda option: option.value
)
def test_step_equals_float32_adamw_with_states_rounded_to_bfloat16(
    implementation: Implementation,
) -> None:
    """Oracle: torch.optim.AdamW, or FusedAdamW for its fused form, and rounding by hand:
    bitwise."""
    params, optimizer = train(OptimStateDType.bfloat16, implementation)
    expected, oracle = train(OptimStateDType.float32, implementation, rounds=True)
    for name, param in params.items():
        assert torch.equal(param, expected[name])
        for moment in MOMENTS:
            assert optimizer.state[param][moment].dtype == torch.bfloat16
            assert torch.equal(
                optimizer.state[param][moment].float(),
                oracle.state[expected[name]][moment],
            )
        assert optimizer.state[param]["step"] == 4


@pytest.mark.parametrize(
    ("beta", "falls"), [(LARGEST_BFLOAT16_BETA, True), (0.95, True), (0.997, False)]
)
def test_accepted_betas_let_bfloat16_moments_decay(beta: float, falls: bool) -> None:
    """Oracle: every bfloat16 between 1 and 2, multiplied and rounded."""
    means = 1 + torch.arange(128) / 128
    assert bool(((means * beta).bfloat16().float() < means).all()) == falls
