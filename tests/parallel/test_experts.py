"""Experts under FSDP: the sharded dim of their stacks."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from fsdptoys.config.schema import Config
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.placement import placement
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.tiny import TINY, make_config


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 24, 16), 4, None),
        ((4, 24, 16), 4, None),
        ((5, 24, 16), 4, 1),
        ((16, 24, 16), 12, 1),
        ((3, 24, 16), 4, 1),
        ((3, 22, 16), 4, 2),
        ((3, 22, 18), 4, None),
        ((2, 16), 4, None),
        ((2,), 4, None),
    ],
)
def test_indivisible_expert_stacks_are_sharded_along_a_divisible_dim(
    shape: tuple[int, ...], ranks: int, dim: int | None
) -> None:
    """Oracle: the rule; None is FSDP2's own choice, the first dim."""
    assert placement(torch.nn.Parameter(torch.empty(shape)), ranks) == (
        None if dim is None else Shard(dim)
    )


def local_shares(config: Config) -> dict[str, tuple[str, float]]:
    """Placement, and this rank's share, of the expert parameters."""
    params = dict(Trainer(config).strategy.named_parameters())
    return {
        name: (str(param.placements), param.to_local().numel() / param.numel())
        for name, param in params.items()
        if ".experts." in name and isinstance(param, DTensor)
    }


def test_fewer_experts_than_ranks_are_sharded_evenly() -> None:
    """Oracle: a quarter on each of four ranks, although there are three experts, and no rank's
    share is padding."""
    for shares in run_ranks(
        4, local_shares, make_config(FSDP2Config(), 4, model=TINY["qwen3_moe"])
    ):
        assert len(shares) == 4
        assert all(
            share == 0.25 and "dim=1" in placements for placements, share in shares.values()
        ), shares
