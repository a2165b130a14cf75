"""Sums over grains: equal in any order, and with the calls of an accelerator."""

from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdptoys.exact import products
from fsdptoys.exact.attention import GRADIENTS, on_grid
from fsdptoys.parallel import SingleConfig
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import levels
from tests.harness.tiny import PLAIN_KERNELS, TINY, make_config, tiny_model

PARTS = torch.tensor([2.0, 2.0**-52, 1.0, 2.0**-24, -2.0])
"""Numbers of bfloat16. Without the second their sum is halfway between two float32 numbers."""


def rounded_sums(parts: torch.Tensor) -> set[float]:
    """Float64 sums in every order, rounded to float32."""
    sums = set()
    for order in permutations(parts.double().tolist()):
        total = torch.zeros((), dtype=torch.float64)
        for part in order:
            total += part
        sums.add(total.float().item())
    return sums


def test_sums_of_parts_on_the_grid_are_equal_in_any_order() -> None:
    """Oracle: all orders of five numbers; plain float64 sums of them round to two results."""
    assert rounded_sums(PARTS) == {1.0, 1.0 + 2.0**-23}
    assert rounded_sums(on_grid(PARTS, GRADIENTS)) == {1.0}


MODELS = {
    "llama": tiny_model(),
    **{family: TINY[family] for family in ("gpt2", "qwen3_moe", "llama4")},
}


def trained(
    model: Any, dtype: DType, **options: Any
) -> tuple[list[float], list[Tensor]]:
    """Losses of two steps, and the parameters after them."""
    common = {
        "model": model,
        "deterministic": Deterministic.layout,
        "kernels": PLAIN_KERNELS,
        "steps": 2,
    }
    trainer = Trainer(
        make_config(SingleConfig(param_dtype=dtype), 1, **{**common, **options})
    )
    trainer.train()
    params = [param.detach().clone() for _, param in trainer.strategy.full_parameters()]
    return [step.loss for step in trainer.history], params


def compare_calls(
    family: str, dtype: DType
) -> tuple[list[float], list[float], list[float], bool]:
    """Losses with a CPU's calls, with an accelerator's, and of its micro-batches; whether these
    keep its parameters."""
    whole = {"batch_size": 4, "grad_accum": 1}
    parts = {"batch_size": 2, "grad_accum": 2}
    expected, _ = trained(MODELS[family], dtype, **whole)
    with mock.patch.object(products, "CPU_BLOCKS", products.DEVICE_BLOCKS):
        losses, params = trained(MODELS[family], dtype, **whole)
        halves, split = trained(MODELS[family], dtype, **parts)
    return expected, losses, halves, all(map(torch.equal, params, split))


CALLS = {
    f"{family} {dtype.value}": (family, dtype)
    for family in MODELS
    for dtype in (DType.float32, DType.bfloat16)
}


@pytest.mark.parametrize(
    "case",
    levels(
        CALLS,
        {"llama bfloat16", "gpt2 float32", "qwen3_moe float32", "llama4 bfloat16"},
    ),
)
def test_calls_of_an_accelerators_size_keep_the_bits_of_a_split_batch(
    case: str,
) -> None:
    """Oracle: a batch in one piece against two micro-batches; and losses with a CPU's calls, which
    round otherwise."""
    family, dtype = CALLS[case]
    ((expected, losses, halves, same),) = run_ranks(1, compare_calls, family, dtype)
    assert losses == halves and same
    assert losses == pytest.approx(
        expected, rel=1e-5 if dtype is DType.float32 else 1e-2
    )
