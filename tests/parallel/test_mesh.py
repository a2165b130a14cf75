"""The device mesh: shapes, nodes and timeouts."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.parallel.device_mesh import dense_mesh
from fsdptoys.parallel.mesh import MeshConfig, straddling
from tests.harness.ranks import GROUP_TIMEOUT, run_ranks

Layout = tuple[tuple[str, ...] | None, tuple[int, ...], list[int], list[timedelta]]
TIMEOUT = timedelta(seconds=77)


def layouts(sizes: list[int]) -> list[Layout]:
    """Return names, sizes, ranks and timeouts of axes; an axis of all ranks has the default
    group's."""
    rows: list[Layout] = []
    for size in sizes:
        axes = MeshConfig(size).axes(4, shards=True)
        mesh = dense_mesh(axes, Device("cpu"), TIMEOUT)
        groups = mesh.get_all_groups() if mesh.ndim > 1 else []
        timeouts = [
            group._get_backend(torch.device("cpu")).options._timeout for group in groups
        ]
        ranks = mesh.mesh.flatten().tolist()
        rows.append((mesh.mesh_dim_names, tuple(mesh.shape), ranks, timeouts))
    dist.barrier()  # a rank that ended would break connections that others are still making
    return rows


def test_mesh_has_a_second_axis_only_with_replicas_and_the_run_timeout() -> None:
    """Oracle: shapes by hand; neighbors share a copy; PyTorch's own groups would wait for half an
    hour."""
    for rows in run_ranks(4, layouts, [-1, 4, 2, 1]):
        assert rows == [
            (("shard",), (4,), [0, 1, 2, 3], []),
            (("shard",), (4,), [0, 1, 2, 3], []),
            (("replicate", "shard"), (2, 2), [0, 1, 2, 3], [TIMEOUT] * 2),
            (("replicate", "shard"), (4, 1), [0, 1, 2, 3], [GROUP_TIMEOUT, TIMEOUT]),
        ]


@pytest.mark.parametrize(
    ("size", "world_size", "fix"), [(6, 8, 4), (3, 4, 2), (16, 8, 8), (2, 1, 1)]
)
def test_indivisible_fsdp_size_is_refused_with_a_divisor(
    size: int, world_size: int, fix: int
) -> None:
    """Oracle: the largest divisor up to that size."""
    with pytest.raises(
        ConfigError,
        match=f"mesh.fsdp_size={size} must divide .* set mesh.fsdp_size={fix} or",
    ):
        MeshConfig(size).shard_ranks(world_size)


@pytest.mark.parametrize(
    ("word", "world_size", "node_ranks", "size"),
    [("node", 16, 8, 8), ("node", 8, 8, 8), ("node", 4, 8, 4), ("node", 6, 1, 1),
     ("hybrid", 16, 8, 8), ("hybrid", 8, 8, 4), ("hybrid", 2, 2, 1), ("hybrid", 9, 9, 3),
     ("hybrid", 5, 5, 1), ("hybrid", 1, 1, 1), ("hybrid", 6, 1, 3), ("hybrid", 3, 8, 1)],
)  # fmt: skip
def test_words_for_fsdp_size_become_numbers(
    word: str, world_size: int, node_ranks: int, size: int
) -> None:
    """Oracle: the table: a node's ranks; hybrid takes the largest proper divisor of all ranks on
    one node."""
    config = MeshConfig(word)
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
    groups = [
        range(start, start + shard_ranks) for start in range(0, world_size, shard_ranks)
    ]
    machines = [len({rank // node_ranks for rank in group}) for group in groups]
    assert warns == (
        shard_ranks < world_size
        and max(machines) * min(node_ranks, shard_ranks) > shard_ranks
    )
    assert (straddling(shard_ranks, world_size, node_ranks) is not None) == warns
