"""Switches changed on a composed configuration, and sizes of the shard axis."""

import copy

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.plan.search.combinations import shard_sizes
from fsdptoys.plan.search.switches import (
    overrides_between,
    validate_switches,
    vary,
)
from tests.plan.formula_search import MODEL, compose


def test_switches_are_reversible() -> None:
    """Oracle: a configuration changed twice equals the first, without overrides between them;
    settings of a switch that is off have their defaults."""
    base = compose(
        [*MODEL, "memory.optimizer_offload=true", "memory.offload_bucket_mib=64"]
    )
    untouched = copy.deepcopy(base)
    off = vary(base, {"memory.optimizer_offload": False})
    assert overrides_between(base, off) == [
        "memory.optimizer_offload=false",
        "memory.offload_bucket_mib=256",
    ]
    on = vary(off, {"memory.optimizer_offload": True, "memory.offload_bucket_mib": 64})
    assert on == base == untouched and overrides_between(base, on) == []
    validate_switches(on, 8, "cuda")
    assert base == untouched
    with pytest.raises(ConfigError, match="offload_bucket_mib=64 has no effect"):
        vary(
            base,
            {"memory.optimizer_offload": False},
            fixed=["memory.offload_bucket_mib"],
        )


@pytest.mark.parametrize(
    ("world_size", "devices", "every", "sizes"),
    [
        (1, 8, True, [1]),
        (6, 8, True, [2, 6]),
        (7, 8, True, [7]),
        (16, 8, True, [8, 16]),
        (8, 8, True, [2, 4, 8]),
        (15, 8, True, [15]),
        (64, 8, True, [8, 16, 32, 64]),
        (16, 8, False, [8, 16]),
        (48, 6, True, [6, 8, 12, 16, 24, 48]),
    ],
)
def test_shard_axis_sizes(
    world_size: int, devices: int, every: bool, sizes: list[int]
) -> None:
    """Oracle: computed by hand; powers of two, the machine and its doubles, as far as they divide
    the world."""
    assert shard_sizes(world_size, devices, every) == sizes
