"""How the ranks are laid out: one axis that shards, and a second that replicates where there is hybrid sharding.

A mesh of one axis is made wherever nothing is replicated: FSDP2 treats a (1, N) mesh as hybrid and keeps every reduced
gradient on the device until the backward ends.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .device import Device
from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"


@dataclass
class MeshConfig:
    """Layout of the ranks."""

    fsdp_size: int = -1
    """Ranks that share one copy of the parameters; -1 for all of them. The rest replicate: HSDP."""

    def __post_init__(self) -> None:
        """Check the value by itself; whether it divides the world is checked once the world is known."""
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must be at least 1, or -1 for all ranks; set mesh.fsdp_size=-1"
            )

    def shard_ranks(self, world_size: int) -> int:
        """Ranks along the shard axis.

        Raises:
            ConfigError: if they do not divide the world size.
        """
        if self.fsdp_size == -1:
            return world_size
        if world_size % self.fsdp_size:
            divisor = max(d for d in range(1, min(self.fsdp_size, world_size) + 1) if world_size % d == 0)
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must divide the world size {world_size}; "
                f"set mesh.fsdp_size={divisor} or launch.nproc_per_node={self.fsdp_size}"
            )
        return self.fsdp_size


def build_mesh(config: MeshConfig, world_size: int, device: Device) -> DeviceMesh:
    """Lay out the ranks of the default process group.

    Returns:
        A mesh ``(shard,)``, or ``(replicate, shard)`` where ``mesh.fsdp_size`` is smaller than the world.
    """
    shard = config.shard_ranks(world_size)
    if shard == world_size:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=(SHARD_AXIS,))
    return init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))


def is_dtensor(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether a tensor is spread over a mesh."""
    module = sys.modules.get("torch.distributed.tensor")  # takes a second to import, and is there where one was made
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    with torch.no_grad():  # or the local part would come as a view that autograd knows
        return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def local_bounds(param: Tensor) -> tuple[tuple[int, int], ...]:
    """First and past-the-last index, in each dim of the full tensor, of what this rank holds.

    Args:
        param: a plain tensor, or a DTensor whose placements shard evenly-chunked dims (``torch.chunk``) or replicate.
    """
    bounds = [(0, size) for size in param.shape]
    if is_dtensor(param):
        from torch.distributed.tensor import Shard

        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                start, stop = bounds[placement.dim]
                chunk = -(-(stop - start) // param.device_mesh.size(axis))
                low = min(start + chunk * coordinate[axis], stop)
                bounds[placement.dim] = (low, min(low + chunk, stop))
    return tuple(bounds)
