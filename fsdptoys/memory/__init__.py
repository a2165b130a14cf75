"""Switches that trade time for memory, one file each; their settings are in ``configs/memory``."""

from .activation_checkpointing import (
    SAVED_OPERATORS,
    GradientCheckpointing,
    checkpoint_blocks,
)
from .activation_offload import ActivationOffload
from .bucketed_optimizer import BucketedOptimizer, BucketedStepper
from .config import CPUOffloadExecutor, MemoryConfig, OffloadSchedule, OffloadStateDType
from .cpu_offload import overlap_cpu_offload, threads_per_rank
from .offload_own_loop import OptimizerOffload
from .optimizer_in_backward import OptimizerInBackward
from .optimizer_offload import offload_optimizer
from .optimizer_stepper import OptimizerStepper

__all__ = [
    "SAVED_OPERATORS",
    "ActivationOffload",
    "BucketedOptimizer",
    "BucketedStepper",
    "CPUOffloadExecutor",
    "GradientCheckpointing",
    "MemoryConfig",
    "OffloadSchedule",
    "OffloadStateDType",
    "OptimizerInBackward",
    "OptimizerOffload",
    "OptimizerStepper",
    "checkpoint_blocks",
    "offload_optimizer",
    "overlap_cpu_offload",
    "threads_per_rank",
]
