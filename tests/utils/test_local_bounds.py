"""Bounds of a DTensor's shard in the full tensor."""

import pytest
import torch
from torch import nn

from fsdptoys.utils.dtensor import local_bounds
from tests.harness.ranks import run_ranks

CASES = [(8, 0, 0), (8, 0, 1), (8, 1, 0), (12, 0, 0)]
"""Rows of the matrix, and the dims that the two mesh axes shard."""


def shard_twice() -> list[bool]:
    """Shard matrices over one mesh axis, then by FSDP2 over another; compare the bounds with the
    values held."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "inner"))
    right_bounds = []
    for rows, inner, outer in CASES:
        full = torch.arange(rows * 4.0).view(rows, 4)
        layer = nn.Linear(4, rows, bias=False)
        layer.weight = nn.Parameter(
            distribute_tensor(full, mesh["inner"], [Shard(inner)])
        )
        fully_shard(
            layer,
            mesh=mesh["shard"],
            shard_placement_fn=lambda param, dim=outer: Shard(dim),
        )
        (top, bottom), (left, right) = local_bounds(layer.weight)
        local = layer.weight.to_local()  # type: ignore[attr-defined]
        right_bounds.append(torch.equal(local, full[top:bottom, left:right]))
    return right_bounds


@pytest.fixture(scope="module")
def right_bounds() -> list[list[bool]]:
    """Whether the bounds of each case are right, on each of four ranks."""
    return run_ranks(4, shard_twice)


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_bounds_of_shards_of_shards_are_those_of_the_values_held(
    case: int, right_bounds: list[list[bool]]
) -> None:
    """Oracle: the values of the local tensor, on four ranks; both axes shard the rows, or one each
    dim."""
    assert [ranks[case] for ranks in right_bounds] == [True] * 4
