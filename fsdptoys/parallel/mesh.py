"""Layout of the ranks: one axis that shards, and a second that replicates under hybrid sharding.

Without replicas the mesh has one axis: FSDP2 treats a (1, N) mesh as hybrid and keeps every reduced gradient on the
device until the backward ends.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"

NODE = "node"
"""``mesh.fsdp_size=node`` keeps each copy of the parameters within a node."""

HYBRID = "hybrid"
"""``mesh.fsdp_size=hybrid`` is ``node`` on several nodes, and the largest size that leaves two copies on one node."""


@dataclass
class MeshConfig:
    """Layout of the ranks."""

    fsdp_size: Any = -1
    """Ranks that share one copy of the parameters: a number, node, hybrid, or -1 for all. The others replicate (HSDP).

    ``node`` is the ranks of a node; ``hybrid`` is ``node`` on several nodes, and half of the ranks on one.
    """

    def __post_init__(self) -> None:
        if self.fsdp_size in (NODE, HYBRID):
            return
        if type(self.fsdp_size) is not int:
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must be a number of ranks, {NODE} for those of a node, {HYBRID} for "
                f"at least two copies, or -1 for all ranks; set mesh.fsdp_size={NODE}"
            )
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must be at least 1, or -1 for all ranks; set mesh.fsdp_size=-1"
            )

    def resolve(self, world_size: int, node_ranks: int) -> None:
        """Replace ``node`` and ``hybrid`` by a number.

        Raises:
            ConfigError: if nodes have different numbers of ranks.
        """
        if self.fsdp_size == HYBRID and not 1 < node_ranks < world_size:
            self.fsdp_size = max((size for size in range(1, world_size // 2 + 1) if world_size % size == 0), default=1)
        if self.fsdp_size in (NODE, HYBRID):
            size = min(node_ranks, world_size)
            if world_size % size:
                raise ConfigError(
                    f"mesh.fsdp_size={self.fsdp_size} needs equally many ranks on each node, and {world_size} ranks "
                    f"are no multiple of the {size} of this one; start as many on each, or set mesh.fsdp_size=-1"
                )
            self.fsdp_size = size

    def shard_ranks(self, world_size: int) -> int:
        """Ranks along the shard axis of a resolved configuration.

        Raises:
            ConfigError: if they do not divide the world size.
        """
        size = self.fsdp_size
        assert isinstance(size, int), "it must have been resolved"
        if size == -1:
            return world_size
        if world_size % size:
            divisor = max(d for d in range(1, min(size, world_size) + 1) if world_size % d == 0)
            raise ConfigError(
                f"mesh.fsdp_size={size} must divide the world size {world_size}; "
                f"set mesh.fsdp_size={divisor} or launch.nproc_per_node={size}"
            )
        return size


def straddling(shard_ranks: int, world_size: int, node_ranks: int) -> str | None:
    """A warning where shard groups straddle nodes although another size would avoid it.

    Groups whose size divides a node's ranks, or is a multiple of them, begin and end with nodes.
    """
    if shard_ranks in (1, world_size) or node_ranks >= world_size:
        return None
    if shard_ranks % node_ranks == 0 or node_ranks % shard_ranks == 0:
        return None
    return (
        f"mesh.fsdp_size={shard_ranks} on nodes of {node_ranks} ranks has groups that lie across two nodes, so "
        f"that every gather waits for the network between them; mesh.fsdp_size={NODE} keeps each within one"
    )


def build_mesh(config: MeshConfig, world_size: int, device: Device, timeout: timedelta | None = None) -> DeviceMesh:
    """Lay out the ranks: ``(shard,)``, or ``(replicate, shard)`` where ``mesh.fsdp_size`` is smaller than the world.

    ``timeout`` is for collectives along two axes; a mesh of one axis uses the default group's.
    """
    shard = config.shard_ranks(world_size)
    if shard == world_size:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=(SHARD_AXIS,))
    return hybrid_mesh(world_size // shard, shard, device, timeout)


def hybrid_mesh(replicas: int, shard: int, device: Device, timeout: timedelta | None) -> DeviceMesh:
    """A mesh ``(replicate, shard)`` as of ``init_device_mesh``, which has no argument for the timeout."""
    world = dist.group.WORLD
    assert world is not None
    ranks = torch.arange(replicas * shard).view(replicas, shard)
    replica, place = divmod(dist.get_rank(), shard)
    axes = ((f"mesh_{REPLICATE_AXIS}", ranks.T, place), (f"mesh_{SHARD_AXIS}", ranks, replica))
    groups: list[Any] = []
    for name, axis, own in axes:
        members = axis[own].tolist()
        if len(members) == dist.get_world_size():
            groups.append(world)
        elif world.bound_device_id is not None:  # all ranks take part in one split, which makes all groups of an axis
            groups.append(dist.split_group(split_ranks=axis.tolist(), timeout=timeout, group_desc=name))
        else:  # only a group's own ranks take part, so the cost does not grow with the world
            groups.append(dist.new_group(members, timeout=timeout, use_local_synchronization=True, group_desc=name))
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
