"""Effect of every strategy setting on the collectives of one step."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config
from tests.parallel.collective_counts import (
    GATHER,
    LAYERS,
    REDUCE,
    SCATTER,
    second_step,
)

UNITS = {FSDP1Config: LAYERS + 3, FSDP2Config: LAYERS + 2}
"""Embedding, blocks and head; the norm is FSDP1's root alone, and in one unit with FSDP2's head."""


ACCUMULATING: dict[str, tuple[ParallelConfig, str, int]] = {
    "fsdp1": (FSDP1Config(), SCATTER, UNITS[FSDP1Config]),
    "fsdp2": (FSDP2Config(), SCATTER, UNITS[FSDP2Config]),
    "ddp": (DDPConfig(), REDUCE, 1),
}
"""Strategies, their reductions, and the number of these in a micro-batch; a tiny model fits one DDP
bucket."""
DEPTHS = [
    (FSDP1Config, 0),
    (FSDP1Config, 1),
    (FSDP2Config, 0),
    (FSDP2Config, 1),
    (FSDP2Config, 2),
]

Events = Callable[..., list[str]]


@pytest.fixture(scope="module")
def events_of() -> Events:
    """Record a step of every strategy and setting, in one group of ranks."""
    settings: list[ParallelConfig] = [
        config(forward_prefetch=n, backward_prefetch=n) for config, n in DEPTHS
    ]
    for config in UNITS:
        settings += [
            config(reshard_after_forward=policy) for policy in ReshardAfterForward
        ]
        settings += [
            config(),
            config(wrap=Wrap.block),
            config(wrap=Wrap.block_attn_mlp),
        ]
    runs = [(parallel, {}) for parallel in [*settings, DDPConfig()]]
    for parallel, _, _ in ACCUMULATING.values():
        runs += [
            (parallel, {"grad_accum": 3, "deterministic": mode})
            for mode in (False, True)
        ]
    keys = [(repr(parallel), *train.items()) for parallel, train in runs]
    configs = {
        key: make_config(
            parallel,
            2,
            **{"deterministic": False, "steps": 1, "grad_accum": 1, **train},
        )
        for key, (parallel, train) in zip(keys, runs, strict=True)
    }
    events = dict(
        zip(configs, run_ranks(2, second_step, list(configs.values()))[0], strict=True)
    )
    return lambda parallel, **train: events[(repr(parallel), *train.items())]


@pytest.mark.parametrize("config", UNITS)
def test_resharding_policy_determines_the_number_of_gathers(
    config: type[FSDP1Config] | type[FSDP2Config], events_of: Events
) -> None:
    """Oracle: units counted by hand; the forward gathers each once, the backward the resharded
    ones."""
    gathers = {
        policy.value: events_of(config(reshard_after_forward=policy)).count(GATHER)
        for policy in ReshardAfterForward
    }
    # FSDP2's embedding stays sharded in the backward, which needs no weight for a look-up.
    again = LAYERS + (1 if config is FSDP1Config else 0)
    assert gathers == {
        "never": UNITS[config],
        "default": UNITS[config] + again,
        "always": UNITS[config] + again + 1,
    }


@pytest.mark.parametrize("config", UNITS)
def test_wrap_policy_determines_the_number_of_units(
    config: type[FSDP1Config] | type[FSDP2Config], events_of: Events
) -> None:
    """Oracle: units counted by hand; each unit reduces its gradients once."""
    assert events_of(config(wrap=Wrap.block)).count(SCATTER) == UNITS[config]
    assert (
        events_of(config(wrap=Wrap.block_attn_mlp)).count(SCATTER)
        == UNITS[config] + 2 * LAYERS
    )


@pytest.mark.parametrize(
    "deterministic", [False, True], ids=["default", "deterministic"]
)
@pytest.mark.parametrize("name", ACCUMULATING)
def test_accumulation_reduces_once_per_step_unless_deterministic(
    name: str, deterministic: bool, events_of: Events
) -> None:
    """Oracle: reductions of one micro-batch, and its gathers, times their number."""
    parallel, kind, units = ACCUMULATING[name]
    events = events_of(parallel, grad_accum=3, deterministic=deterministic)
    # Two all-reduces are the trainer's own: valid tokens, and loss; clipping has a third where
    # gradients are sharded.
    of_trainer = {SCATTER: 0, REDUCE: 2}[kind]
    assert events.count(kind) - of_trainer == units * (3 if deterministic else 1)
    # FSDP1 keeps its root and head gathered until it reduces.
    assert events.count(GATHER) <= 3 * events_of(parallel).count(GATHER)


@pytest.mark.parametrize(("config", "depth"), DEPTHS)
def test_prefetch_depth_determines_how_early_units_are_gathered(
    config: type[FSDP1Config] | type[FSDP2Config], depth: int, events_of: Events
) -> None:
    """Oracle: position of the gathers among the blocks' forwards and backwards."""
    events = events_of(config(forward_prefetch=depth, backward_prefetch=depth))
    before_first_block = events[: events.index("forward 0")]
    # Embedding and first block are gathered alone, and FSDP1's root, the norm, before all others.
    root = 1 if config is FSDP1Config else 0
    assert before_first_block.count(GATHER) == root + 2 + depth
    # The head is gathered in the forward, unless it was prefetched; the last block alone.
    later = events[
        events.index(f"forward {LAYERS - 1}") + 1 : events.index(
            f"backward {LAYERS - 1}"
        )
    ]
    head = 1 if depth == 0 else 0
    assert later.count(GATHER) == head + 1 + depth
    assert events.count(GATHER) == events_of(config()).count(GATHER)


def differing_sums() -> int:
    """The number of sums over the ranks, out of 1,000, that differ at another place in the same
    buffer."""
    terms = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    sums = terms.repeat(4)
    dist.all_reduce(sums)
    return int((sums.view(4, 1000) != sums[:1000]).any(0).sum())


@pytest.mark.parametrize("world_size", [2, 4])
def test_ring_summation_order_depends_on_the_buffer_offset(world_size: int) -> None:
    """Oracle: the same numbers at the buffer's start; the cause of different last bits in flat and
    per-parameter sharding.
    """
    differing = run_ranks(world_size, differing_sums)[0]
    assert (differing == 0) == (world_size == 2)
