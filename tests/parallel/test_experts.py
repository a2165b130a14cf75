"""Experts under FSDP: the sharded dim of their stacks, and experts without a token."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from fsdptoys.config.schema import Config
from fsdptoys.models.moe import Router
from fsdptoys.optim import SGDConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.placement import placement
from fsdptoys.train.trainer import Trainer
from tests.harness.offloaded_runs import outcome
from tests.harness.outcomes import Outcome
from tests.harness.ranks import run_ranks
from tests.harness.tiny import TINY, make_config, with_sizes
from tests.parallel.numeric_outcomes import only_the_first


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
            share == 0.25 and "dim=1" in placements
            for placements, share in shares.values()
        ), shares


def train_with_idle_experts(configs: list[Config]) -> list[tuple[Outcome, list[float]]]:
    """Return outcomes, and the norm of each expert's updates."""
    Router.forward = only_the_first  # type: ignore[method-assign]
    name = "layers.0.mlp.experts.down_proj"
    results = []
    for config in configs:
        trainer = Trainer(config)
        before = dict(trainer.strategy.full_parameters())[name].clone()
        trainer.train()
        update = dict(trainer.strategy.full_parameters())[name] - before
        results.append((outcome(trainer), update.flatten(1).norm(dim=1).tolist()))
    return results


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_idle_experts_neither_hang_nor_change_gradients(ranks: int) -> None:
    """Oracle: one process; every token is routed to expert 0, so no rank updates the others."""
    options: dict[str, Any] = {
        "model": with_sizes(TINY["qwen3_moe"], top_k=1),
        "optim": SGDConfig(lr=0.1, weight_decay=0.0),
        "steps": 3,
    }
    strategies = [
        DDPConfig(),
        FSDP1Config(),
        FSDP1Config(use_orig_params=False),
        FSDP2Config(),
    ]
    configs = [make_config(parallel, ranks, **options) for parallel in strategies]
    if ranks == 4 and TORCH >= (2, 8):  # which HSDP needs under FSDP2 on a CPU
        configs.append(make_config(FSDP2Config(), ranks, fsdp_size=2, **options))
    alone = [make_config(SingleConfig(simulated_ranks=ranks), 1, **options)]
    ((expected, _),) = run_ranks(1, train_with_idle_experts, alone)[0]
    for result, (used, *idle) in run_ranks(ranks, train_with_idle_experts, configs)[0]:
        assert result == expected
        assert used > 0 and idle == [0.0, 0.0]
