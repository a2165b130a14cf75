"""Settings of FSDP1, FSDP2 and the FSDP to read, and which modules of a model become units.

ZeRO-3 (arXiv:1910.02054): every rank keeps 1/N of parameters, gradients and optimizer states. A unit's parameters are
all-gathered before its forward and again before its backward; its gradients are reduce-scattered after the backward.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_at_most

from .mesh import MeshConfig
from .strategy import ParallelContext, ReducingConfig, Strategy

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

    wrap: Wrap = Wrap.block
    """Which modules become units."""
    reshard_after_forward: ReshardAfterForward = ReshardAfterForward.default
    """Which units free their gathered parameters after the forward."""
    forward_prefetch: int = 0
    """Units gathered ahead of the one that computes, in the forward; 0 lets the device's queue do it."""
    backward_prefetch: int = 1
    """Units gathered ahead of the one that computes, in the backward."""

    @property
    def hooks_parts_of_blocks(self) -> bool:
        """Where attention and feed-forward are units of their own."""
        return self.wrap is Wrap.block_attn_mlp

    def __post_init__(self) -> None:
        """Check each value by itself."""
        check_at_most("parallel", self, forward_prefetch=10**6, backward_prefetch=10**6)
        for name in ("forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"parallel.{name}={value} must be at least 0; set parallel.{name}=0")

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Check that the shard axis divides the world."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        mesh.shard_ranks(world_size)


@dataclass
class FSDP1Config(FSDPConfig):
    """Flat-parameter sharding."""

    name: ClassVar[str] = "fsdp1"
    flattens_parameters: ClassVar[bool] = True

    use_orig_params: bool = True
    """Show the optimizer the model's own parameters rather than one flat parameter a unit."""

    @property
    def keeps_parameters(self) -> bool:
        """Flat parameters mix those that decay with those that do not."""
        return self.use_orig_params

    @property
    def compiles(self) -> bool:
        """The compiler leaves modules with flat parameters as they are."""
        return self.use_orig_params

    @property
    def matrices_lost(self) -> str:
        """A shard of a flat parameter ends in the middle of a row."""
        return "cuts elsewhere than between rows"

    @property
    def defers_updates(self) -> bool:
        """Its streams wait for the one that updates parameters once a forward, in the root."""
        return False

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Refuse what FSDP1 cannot do, or does silently wrong."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        if world_size > 1 and mesh.shard_ranks(world_size) == 1:
            raise ConfigError(
                "mesh.fsdp_size=1 makes FSDP1 keep whole parameters and skip the all-reduce over replicas; "
                "set parallel=ddp, or parallel=fsdp2 to keep the mesh"
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"parallel.{name}={getattr(self, name)} is deeper than FSDP1 can prefetch; "
                    f"set parallel.{name}=1 or parallel=fsdp2"
                )
        if cpu_offload and device_type == "cpu":
            raise ConfigError(
                "memory.cpu_offload=true needs an accelerator to offload from under parallel=fsdp1; "
                "set parallel=fsdp2 or memory.cpu_offload=false"
            )

    def build(self, context: ParallelContext) -> Strategy:
        """Construct the strategy."""
        from .fsdp1 import FSDP1

        return FSDP1(self, context)


@dataclass
class FSDP2Config(FSDPConfig):
    """Per-parameter sharding."""

    name: ClassVar[str] = "fsdp2"
    overlaps_cpu_offload: ClassVar[bool] = True

    @property
    def gradients_held(self) -> None:
        """A unit's are whole when it was reduced."""

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Refuse what the installed torch cannot do."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        replicated = mesh.shard_ranks(world_size) < world_size
        if device_type == "cpu" and replicated and TORCH < (2, 8):
            raise ConfigError(
                f"mesh.fsdp_size={mesh.fsdp_size} replicates, which FSDP2 can do on a CPU from torch 2.8 on (found "
                f"{torch.__version__}); set mesh.fsdp_size=-1 or parallel=fsdp1"
            )

    def build(self, context: ParallelContext) -> Strategy:
        """Construct the strategy."""
        from .fsdp2 import FSDP2

        return FSDP2(self, context)


@dataclass
class ToyFSDPConfig(FSDPConfig):
    """FSDP2 as in ``fsdptoys.toys.fsdp``; the next unit is gathered ahead in the forward too, even with 0 of them."""

    name: ClassVar[str] = "toy_fsdp"

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Refuse what it leaves out."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        self._refuse_cpu_offload(cpu_offload)

    def build(self, context: ParallelContext) -> Strategy:
        """Construct the strategy."""
        from .toy_fsdp import ToyFSDP

        return ToyFSDP(self, context)


def block_units(block: nn.Module, wrap: Wrap) -> list[str]:
    """Names of a block's own parts that become units before the block itself does."""
    return ["attn", "mlp"] if wrap is Wrap.block_attn_mlp else []
