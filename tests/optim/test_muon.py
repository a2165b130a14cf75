"""Muon compared with PyTorch's, its matmuls with a singular value decomposition, and layouts with
one process."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.optim import (
    Implementation,
    MatmulDType,
    MuonConfig,
    UpdateScale,
    build_optimizer,
)
from fsdptoys.optim.muon import orthogonalize

AUTO = MatmulDType.auto
SHAPES = [(24, 24), (40, 12), (12, 40), (33, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_newton_schulz_approximates_the_polar_factor(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Oracle: the polar factor of torch.linalg.svd; five rounds leave singular values between about
    0.7 and 1.2."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    factor = orthogonalize(matrix.to(dtype), 5).float()
    within = left.T @ factor @ right.T
    slack = 0.05 if dtype is torch.bfloat16 else 1e-5
    diagonal = within.diagonal()
    # Singular values below a hundredth of the norm have not converged.
    risen = values > 0.05 * values.norm()
    assert risen.sum() > len(values) // 2
    assert diagonal[risen].min() > 0.65 - slack and diagonal.max() < 1.21 + slack
    assert (within - diagonal.diag()).abs().max() < slack
    assert factor.is_contiguous()


def matrices(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layers.{i}", nn.Parameter(torch.randn(shape, generator=generator)))
        for i, shape in enumerate(SHAPES)
    ]


def take_steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 4
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
@pytest.mark.parametrize("nesterov", [True, False], ids=lambda on: f"nesterov={on}")
@pytest.mark.parametrize("scale", list(UpdateScale), ids=lambda scale: scale.value)
def test_muon_matches_torch_optim_muon_bitwise(
    scale: UpdateScale, nesterov: bool
) -> None:
    """Oracle: torch.optim.Muon, which computes in bfloat16."""
    settings: dict[str, Any] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": nesterov,
        "ns_steps": 4,
    }
    named_params = matrices()
    config = MuonConfig(**settings, ns_dtype=MatmulDType.bfloat16, update_scale=scale)
    names = {name for name, _ in named_params}
    mine = [param for _, param in named_params]
    take_steps(build_optimizer(config, named_params, names, names), mine)
    oracle_params = [param for _, param in matrices()]
    adjust = "match_rms_adamw" if scale is UpdateScale.match_adamw else "original"
    take_steps(
        torch.optim.Muon(oracle_params, **settings, adjust_lr_fn=adjust), oracle_params
    )
    for param, expected in zip(mine, oracle_params, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize(
    "implementation",
    [Implementation.fused, Implementation.foreach],
    ids=lambda option: option.value,
)
def test_parameters_other_than_block_matrices_use_adamw_with_its_own_rate(
    implementation: Implementation,
) -> None:
    """Oracle: torch.optim.AdamW over the same parameters; matrices have a momentum buffer as their
    only state."""

    def model() -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "embed.weight": (9, 4),
            "layers.0.weight": (5, 4),
            "layers.0.bias": (5,),
            "norm.weight": (4,),
        }
        return {
            name: nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in shapes.items()
        }

    mine = model()
    oracle_params = model()
    config = MuonConfig(
        lr=0.1, adamw_lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1,
        ns_dtype=MatmulDType.float32, implementation=implementation,
    )  # fmt: skip
    blocks = {"layers.0.weight", "layers.0.bias"}
    optimizer = build_optimizer(
        config, mine.items(), {"embed.weight", "layers.0.weight"}, blocks
    )
    take_steps(optimizer, list(mine.values()))
    adamw = torch.optim.AdamW(
        [{"params": [oracle_params["embed.weight"]], "weight_decay": 0.1},
         {"params": [oracle_params[name] for name in ("layers.0.bias", "norm.weight")],
          "weight_decay": 0.0}],
        lr=1e-2, betas=(0.8, 0.9), eps=1e-6,
    )  # fmt: skip
    take_steps(adamw, list(oracle_params.values()))
    for name in ("embed.weight", "layers.0.bias", "norm.weight"):
        torch.testing.assert_close(
            mine[name], oracle_params[name], rtol=1e-6, atol=1e-7
        )
    states = {name: set(optimizer.state[param]) for name, param in mine.items()}
    assert states["layers.0.weight"] == {"momentum_buffer"}
    assert (
        states["embed.weight"]
        == states["norm.weight"]
        == {"step", "exp_avg", "exp_avg_sq"}
    )
    assert not torch.equal(mine["layers.0.weight"], model()["layers.0.weight"])


def test_matrices_of_a_stack_are_orthogonalized_separately() -> None:
    """Oracle: the same matrices as parameters of their own."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 8, 5, generator=generator)
    grads = torch.randn(3, 8, 5, generator=generator)
    together = nn.Parameter(stack.clone())
    apart = [nn.Parameter(matrix.clone()) for matrix in stack]
    for named_params in (
        [("layers.w", together)],
        [(f"layers.{i}", matrix) for i, matrix in enumerate(apart)],
    ):
        names = {name for name, _ in named_params}
        optimizer = build_optimizer(
            MuonConfig(lr=0.1, ns_dtype=MatmulDType.float32), named_params, names, names
        )
        together.grad = grads
        for param, grad in zip(apart, grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert torch.equal(together, torch.stack(list(apart)))
