"""The layout of the ranks."""

import pytest

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.mesh import MeshConfig, build_mesh
from scripts.ranks import run_ranks


def layout(sizes: list[int]) -> list[tuple[tuple[str, ...] | None, tuple[int, ...], list[int]]]:
    meshes = [build_mesh(MeshConfig(size), 4, Device("cpu")) for size in sizes]
    return [(mesh.mesh_dim_names, tuple(mesh.shape), mesh.mesh.flatten().tolist()) for mesh in meshes]


def test_a_mesh_has_a_second_axis_only_where_something_is_replicated() -> None:
    """Oracle: shapes by hand; neighbours share a copy of the parameters."""
    for got in run_ranks(4, layout, [-1, 4, 2, 1]):
        assert got == [
            (("shard",), (4,), [0, 1, 2, 3]),
            (("shard",), (4,), [0, 1, 2, 3]),
            (("replicate", "shard"), (2, 2), [0, 1, 2, 3]),
            (("replicate", "shard"), (4, 1), [0, 1, 2, 3]),
        ]


@pytest.mark.parametrize(("size", "world_size", "fix"), [(6, 8, 4), (3, 4, 2), (16, 8, 8), (2, 1, 1)])
def test_a_shard_axis_that_does_not_divide_the_world_names_one_that_does(size: int, world_size: int, fix: int) -> None:
    """Oracle: the largest divisor that is not larger."""
    with pytest.raises(ConfigError, match=f"mesh.fsdp_size={size} must divide .* set mesh.fsdp_size={fix} or"):
        MeshConfig(size).shard_ranks(world_size)
