"""The toy FSDP trains bitwise equal to PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdptoys.parallel.fsdp import TORCH
from tests.harness.ranks import run_ranks
from tests.toys.fsdp_models import (
    NATIVE,
    Case,
    Model,
    assert_matches_native,
    shard_groups,
    shard_tied,
)

BF16 = {"param_dtype": torch.bfloat16}
# PyTorch's default is float32 from then on; the toy's is the dtype of the parameters, as before
if TORCH >= (
    2,
    15,
):
    BF16["reduce_dtype"] = torch.bfloat16
ACCUMULATE = Case(
    before=lambda model, index, count: model.set_requires_gradient_sync(
        index == count - 1
    )
)


def freeze(model: Model) -> None:
    model.blocks[1].requires_grad_(False)
    model.norm.weight.requires_grad_(False)


def recompute(reentrant: bool) -> Callable[[Model], None]:
    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.recomputes = reentrant

    return prepare


def prefetch(model: Any) -> None:
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch(blocks[1::-1])


def wide(param: nn.Parameter) -> Shard | None:
    """Shard along the second dim if divisible."""
    return (
        Shard(1)
        if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0
        else None
    )


def divide_by_8(model: Any) -> None:
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(8.0)
        unit.set_force_sum_reduction_for_comms(True)


WIDE_SUMS = {"mp_policy": {**BF16, "reduce_dtype": torch.float32}}
CASES: dict[str, Case] = {
    "by default": Case(clips=True),
    "without resharding": Case(options={"reshard_after_forward": False}),
    "bf16": Case(options={"mp_policy": BF16}),
    "bf16 reduced in float32": Case(options=WIDE_SUMS),
    "reduced in float64": Case(options={"mp_policy": {"reduce_dtype": torch.float64}}),
    "reduced in float16": Case(options={"mp_policy": {"reduce_dtype": torch.float16}}),
    "accumulation": ACCUMULATE,
    "accumulation in float32": Case(options=WIDE_SUMS, before=ACCUMULATE.before),
    "norm and head together": Case(shard=shard_groups),
    "tied weights": Case(shard=shard_tied, model={"tied": True}),
    "frozen parameters": Case(prepare=freeze),
    "second dim": Case(options={"shard_placement_fn": wide}, model={"dim": 16}),
    "recomputing inside": Case(prepare=recompute(False)),
    "recomputing inside, reentrant": Case(prepare=recompute(True)),
    "recomputing around": Case(model={"around": False}),
    "recomputing around, reentrant": Case(model={"around": True}),
    "blocks used twice": Case(model={"twice": True}),
    "two forwards, one backward": Case(together=True),
    "prefetch lists": Case(configure=prefetch),
    "look-up not gathered": Case(
        shard=shard_groups,
        configure=lambda model: model.embed.set_unshard_in_backward(False),
    ),
    "more ranks than rows": Case(model={"dim": 1}),
    "own divisor": Case(configure=divide_by_8),
}
"""Name → training case, which PyTorch's implementation supports too."""

if not hasattr(NATIVE.FSDPModule, "set_force_sum_reduction_for_comms"):
    del CASES["own divisor"]

CASES_OF_FOUR = {
    "by default": Case(clips=True),
    "HSDP": Case(axes=(2, 2), clips=True),
    "HSDP, bf16 reduced in float32": Case(axes=(2, 2), options=WIDE_SUMS),
    "HSDP, replicas last": Case(
        axes=(2, 2),
        before=lambda model, index, count: model.set_requires_all_reduce(
            index == count - 1
        ),
    ),
    "HSDP of whole replicas": Case(axes=(4, 1)),
    "second dim": Case(options={"shard_placement_fn": wide}, model={"dim": 16}),
    "more ranks than rows": Case(model={"dim": 2}),
}


needs_averages = pytest.mark.skipif(
    TORCH < (2, 8),
    reason="FSDP2 over gloo sums gradients in torch 2.7, where it should average them",
)
ROWS = [(2, case) for case in CASES] + [
    pytest.param(
        4,
        case,
        marks=pytest.mark.extended
        if case in ("by default", "more ranks than rows")
        else (),
    )
    for case in CASES_OF_FOUR
]
ROWS += [
    (1, case)
    for case in ("by default", "accumulation in float32", "norm and head together")
]


@needs_averages
@pytest.mark.parametrize(("ranks", "name"), ROWS)
def test_training_matches_pytorch_bitwise(ranks: int, name: str) -> None:
    """Oracle: PyTorch's ``fully_shard`` with the same arguments; losses, norms and parameters after
    some steps."""
    run_ranks(
        ranks, assert_matches_native, (CASES_OF_FOUR if ranks == 4 else CASES)[name]
    )
