"""Settings that FSDP1, FSDP2 and the toy FSDP share, and which modules of a model become units.

ZeRO-3 (arXiv:1910.02054): every rank keeps 1/N of parameters, gradients and optimizer states. A unit's parameters are
all-gathered before its forward and again before its backward; its gradients are reduce-scattered after the backward.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from torch import nn

from fsdptoys.utils.bounds import at_least

from .mesh import MeshConfig
from .strategy import ReducingConfig

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Wrap(Enum):
    """Which modules become units."""

    block = "block"
    block_attn_mlp = "block_attn_mlp"
    """Attention and feed-forward of each block by themselves: less memory at a time, more collectives."""


class ReshardAfterForward(Enum):
    """Which units free their gathered parameters after the forward."""

    default = "default"
    """All but the last unit, which the backward needs first."""
    always = "always"
    never = "never"
    """None: ZeRO-2; parameters stay gathered until the backward."""


@dataclass
class FSDPConfig(ReducingConfig):
    """Sharded parameters, gradients and optimizer states."""

    shards_parameters: ClassVar[bool] = True
    takes_cpu_offload: ClassVar[bool] = True

    wrap: Wrap = Wrap.block
    """Which modules become units."""
    reshard_after_forward: ReshardAfterForward = ReshardAfterForward.default
    """Which units free their gathered parameters after the forward."""
    forward_prefetch: int = field(default=0, metadata=at_least(0, 10**6))
    """Units gathered ahead of the one that computes, in the forward; 0 lets the device's queue do it."""
    backward_prefetch: int = field(default=1, metadata=at_least(0, 10**6))
    """Units gathered ahead of the one that computes, in the backward."""

    @property
    def hooks_parts_of_blocks(self) -> bool:
        """Whether attention and feed-forward are units of their own."""
        return self.wrap is Wrap.block_attn_mlp

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Check that the shard axis divides the world."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        mesh.shard_ranks(world_size)


def block_units(block: nn.Module, wrap: Wrap) -> list[str]:
    """Names of a block's parts that become units before the block itself does."""
    return ["attn", "mlp"] if wrap is Wrap.block_attn_mlp else []
