"""Bounds of a DTensor's shard in the full tensor."""

import torch
from torch import nn

from fsdptoys.utils.dtensor import local_bounds
from scripts.ranks import run_ranks


def shard_twice(rows: int, dims: tuple[int, int]) -> bool:
    """Shard a matrix over one mesh axis, then by FSDP2 over another; compare the bounds with the values held."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "inner"))
    full = torch.arange(rows * 4.0).view(rows, 4)
    inner, outer = dims
    layer = nn.Linear(4, rows, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(full, mesh["inner"], [Shard(inner)]))
    fully_shard(layer, mesh=mesh["shard"], shard_placement_fn=lambda param: Shard(outer))
    (top, bottom), (left, right) = local_bounds(layer.weight)
    return torch.equal(layer.weight.to_local(), full[top:bottom, left:right])  # type: ignore[attr-defined]


def test_bounds_of_shards_of_shards_are_those_of_the_values_held() -> None:
    """Oracle: the values of the local tensor, on four ranks; both axes shard the rows, or one each dim."""
    for case in ((8, (0, 0)), (8, (0, 1)), (8, (1, 0)), (12, (0, 0))):
        assert run_ranks(4, shard_twice, *case) == [True] * 4, case
