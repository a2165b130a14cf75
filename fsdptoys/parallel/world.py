"""The ranks of a run, their device, and the settings that every collective needs."""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from fsdptoys.device import Device

from .determinism import Deterministic
from .mesh import MeshConfig


@dataclass(frozen=True)
class World:
    """Environment of a strategy and of a trainer."""

    device: Device
    rank: int
    world_size: int
    mesh: MeshConfig
    deterministic: Deterministic = Deterministic.false
    cpu_offload: bool = False
    sum_dtype: torch.dtype = torch.float64
    timeout: timedelta | None = None
    """For collectives in groups that the strategy creates; None for PyTorch's default."""
    cpu_threads: int = 1
    """Threads of this rank for work in host memory."""

    def zero(self) -> Tensor:
        """Return a zero for sums over tokens. In float64 their order does not change the result."""
        return torch.zeros((), dtype=self.sum_dtype, device=self.device.torch_device)
