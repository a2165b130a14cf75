"""Environment of a strategy: device, ranks, and settings of the run that it needs."""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.device import Device

from .determinism import Deterministic
from .mesh import MeshConfig, build_mesh


@dataclass(frozen=True)
class ParallelContext:
    """Environment of a strategy."""

    device: Device
    rank: int
    world_size: int
    mesh: MeshConfig
    deterministic: Deterministic = Deterministic.false
    cpu_offload: bool = False
    sum_dtype: torch.dtype = torch.float64
    timeout: timedelta | None = None
    """For collectives in groups that the strategy makes; None for PyTorch's default."""

    def build_mesh(self) -> DeviceMesh:
        """Lay out the ranks by ``mesh``."""
        return build_mesh(self.mesh, self.world_size, self.device, self.timeout)
