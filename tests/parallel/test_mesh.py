"""The device mesh: shapes, nodes and timeouts."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.parallel.device_mesh import build_mesh
from fsdptoys.parallel.mesh import MeshConfig, straddling
from tests.harness.ranks import run_ranks


def layout(sizes: list[int]) -> list[tuple[tuple[str, ...] | None, tuple[int, ...], list[int]]]:
    meshes = [build_mesh(MeshConfig(size), 4, Device("cpu")) for size in sizes]
    dist.barrier()  # a rank that ended would break connections that others are still making
    return [
        (mesh.mesh_dim_names, tuple(mesh.shape), mesh.mesh.flatten().tolist()) for mesh in meshes
    ]


def test_mesh_has_a_second_axis_only_with_replicas() -> None:
    """Oracle: shapes by hand; neighbors share a copy of the parameters."""
    for got in run_ranks(4, layout, [-1, 4, 2, 1]):
        assert got == [
            (("shard",), (4,), [0, 1, 2, 3]),
            (("shard",), (4,), [0, 1, 2, 3]),
            (("replicate", "shard"), (2, 2), [0, 1, 2, 3]),
            (("replicate", "shard"), (4, 1), [0, 1, 2, 3]),
        ]


@pytest.mark.parametrize(
    ("size", "world_size", "fix"), [(6, 8, 4), (3, 4, 2), (16, 8, 8), (2, 1, 1)]
)
def test_indivisible_fsdp_size_is_refused_with_a_divisor(
    size: int, world_size: int, fix: int
) -> None:
    """Oracle: the largest divisor up to that size."""
    with pytest.raises(
        ConfigError, match=f"mesh.fsdp_size={size} must divide .* set mesh.fsdp_size={fix} or"
    ):
        MeshConfig(size).shard_ranks(world_size)


@pytest.mark.parametrize(
    ("world_size", "node_ranks", "size"), [(16, 8, 8), (8, 8, 8), (4, 8, 4), (6, 1, 1)]
)
def test_node_fsdp_size_is_the_ranks_per_node(world_size: int, node_ranks: int, size: int) -> None:
    """Oracle: the table; a partially used node has all ranks."""
    config = MeshConfig("node")
    config.resolve(world_size, node_ranks)
    assert config.shard_ranks(world_size) == size


@pytest.mark.parametrize(
    ("world_size", "node_ranks", "size"),
    [(16, 8, 8), (8, 8, 4), (2, 2, 1), (9, 9, 3), (5, 5, 1), (1, 1, 1), (6, 1, 3), (3, 8, 1)],
)
def test_hybrid_fsdp_size_leaves_at_least_two_copies(
    world_size: int, node_ranks: int, size: int
) -> None:
    """Oracle: the table; a node's ranks, or the largest proper divisor of all ranks on one node."""
    config = MeshConfig("hybrid")
    config.resolve(world_size, node_ranks)
    assert config.shard_ranks(world_size) == size


def test_node_fsdp_size_needs_equal_ranks_per_node() -> None:
    """Oracle: the expected message."""
    with pytest.raises(
        ConfigError,
        match=r"mesh.fsdp_size=node needs equally many .* 12 ranks are no multiple of the 8",
    ):
        MeshConfig("node").resolve(12, 8)


@pytest.mark.parametrize(
    ("shard_ranks", "world_size", "node_ranks", "warns"),
    [(4, 12, 6, True), (12, 24, 8, True), (3, 12, 6, False), (12, 24, 6, False), (12, 12, 8, False),
     (2, 6, 6, False), (1, 12, 6, False)],
)  # fmt: skip
def test_shard_group_across_nodes_is_reported(
    shard_ranks: int, world_size: int, node_ranks: int, warns: bool
) -> None:
    """Oracle: groups enumerated one by one, and the number of nodes of each."""
    groups = [range(start, start + shard_ranks) for start in range(0, world_size, shard_ranks)]
    machines = [len({rank // node_ranks for rank in group}) for group in groups]
    assert warns == (
        shard_ranks < world_size and max(machines) * min(node_ranks, shard_ranks) > shard_ranks
    )
    assert (straddling(shard_ranks, world_size, node_ranks) is not None) == warns


def timeouts() -> list[timedelta]:
    """Return the timeouts of the groups of both axes."""
    mesh = build_mesh(MeshConfig(2), 4, Device("cpu"), timedelta(seconds=77))
    groups = [mesh.get_group(axis) for axis in ("shard", "replicate")]
    assert [group.group_desc for group in groups] == ["mesh_shard", "mesh_replicate"]
    dist.barrier()
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_mesh_axis_has_the_run_timeout() -> None:
    """Oracle: the options of the groups; PyTorch's own groups would wait for half an hour."""
    assert run_ranks(4, timeouts) == [[timedelta(seconds=77)] * 2] * 4
