"""What ``fully_shard`` can be told about number formats and offloading; PyTorch's classes of these names do as well."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Number formats of a unit."""

    param_dtype: torch.dtype | None = None
    """Of the whole parameters and so of forward and backward; None for that of the shards."""
    reduce_dtype: torch.dtype | None = None
    """That gradients are reduced in, and accumulated in without reduction; None for the one they are computed in."""
    output_dtype: torch.dtype | None = None
    """That outputs are cast to; None leaves them alone."""
    cast_forward_inputs: bool = True
    """Whether inputs are cast to ``param_dtype``."""


@dataclass
class OffloadPolicy:
    """Shards stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer states stay in the memory of the CPU: here only where the mesh is of CPUs."""

    pin_memory: bool = True
    """Whether that memory is pinned."""


def check_offload(policy: Any, device_type: str) -> None:
    """Refuse to offload what would have to travel.

    Raises:
        NotImplementedError: naming the policy.
    """
    pin_memory = getattr(policy, "pin_memory", None)
    if pin_memory is None or (device_type == "cpu" and not pin_memory):
        return
    raise NotImplementedError(
        f"fully_shard(offload_policy={policy}) is not part of this implementation, which keeps shards on the device of "
        f"the mesh ({device_type}): leave it out; on a CPU pin_memory=False will do"
    )
