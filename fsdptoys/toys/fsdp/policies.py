"""Mixed precision and offloading; the names and meanings are those of PyTorch's classes."""

from dataclasses import dataclass
from typing import Any

import torch

from ..tensor_tree import map_tensors


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit."""

    param_dtype: torch.dtype | None = None
    """Of whole parameters, and so of forward and backward; None for the dtype of the shards."""
    reduce_dtype: torch.dtype | None = None
    """Of reductions, and of gradients accumulated without reduction; None for the dtype of the gradients."""
    output_dtype: torch.dtype | None = None
    """To which outputs are cast; None leaves them as they are."""
    cast_forward_inputs: bool = True
    """Cast inputs to ``param_dtype``."""


@dataclass
class OffloadPolicy:
    """Shards stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer states are in CPU memory; accepted only for a mesh of CPUs."""

    pin_memory: bool = True
    """Pin that memory."""


def check_offload(policy: Any, device_type: str) -> None:
    """Reject policies that would move shards off the mesh's device by a NotImplementedError."""
    pin_memory = getattr(policy, "pin_memory", None)
    if pin_memory is None or (device_type == "cpu" and not pin_memory):
        return
    raise NotImplementedError(
        f"fully_shard(offload_policy={policy}) is not part of this implementation, which keeps shards on the device of "
        f"the mesh ({device_type}): leave it out; on a CPU pin_memory=False will do"
    )


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast every floating-point tensor in a nesting; None returns it as it is."""
    if dtype is None:
        return tree
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
