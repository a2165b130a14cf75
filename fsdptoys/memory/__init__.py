"""What trades time for memory: each piece is a switch in ``configs/memory``."""

from dataclasses import dataclass

from torch import nn

from fsdptoys.errors import ConfigError

from .checkpointing import GradientCheckpointing, checkpoint_blocks
from .loss import IGNORE_INDEX, cross_entropy_sum


@dataclass
class MemoryConfig:
    """Switches that trade time for memory."""

    gradient_checkpointing: GradientCheckpointing = GradientCheckpointing.none
    """``full`` computes the activations of each block again in the backward."""
    checkpointing_start_index: int = 0
    """First block that is checkpointed; the ones before it keep their activations."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory and update them there."""
    optimizer_offload: bool = False
    """Keep only optimizer states in host memory; refused in this version."""

    def __post_init__(self) -> None:
        """Check what can be checked without the other rooms."""
        if self.checkpointing_start_index < 0:
            raise ConfigError(
                f"memory.checkpointing_start_index={self.checkpointing_start_index} must be at least 0; set it to 0 "
                "to checkpoint every block"
            )
        if self.checkpointing_start_index and self.gradient_checkpointing is GradientCheckpointing.none:
            raise ConfigError(
                f"memory.checkpointing_start_index={self.checkpointing_start_index} does nothing without "
                "checkpointing; set memory.gradient_checkpointing=full"
            )
        if self.cpu_offload and self.optimizer_offload:
            raise ConfigError(
                "memory.cpu_offload=true and memory.optimizer_offload=true exclude each other, since CPU offload "
                "already keeps the optimizer states in host memory; set memory.optimizer_offload=false"
            )
        if self.optimizer_offload:
            raise ConfigError(
                "memory.optimizer_offload=true is not supported in this version; set memory.cpu_offload=true or "
                "memory.optimizer_offload=false"
            )


def apply_checkpointing(config: MemoryConfig, blocks: nn.ModuleList) -> None:
    """Put gradient checkpointing on the model's blocks, before anything else wraps them."""
    if config.gradient_checkpointing is GradientCheckpointing.full:
        checkpoint_blocks(blocks, config.checkpointing_start_index)


__all__ = ["IGNORE_INDEX", "GradientCheckpointing", "MemoryConfig", "apply_checkpointing", "cross_entropy_sum"]
