"""What trades time for memory: each piece is a switch in ``configs/memory``."""

from .activation_checkpointing import SAVED_OPERATORS, GradientCheckpointing, checkpoint_blocks
from .activation_offload import ActivationOffload
from .bucketed_optimizer import BucketedOptimizer
from .config import CPUOffloadExecutor, MemoryConfig, OffloadSchedule, StateDType
from .cpu_offload import Workers, cpu_threads, overlap_cpu_offload, threads_per_rank
from .optimizer_in_backward import OptimizerInBackward
from .optimizer_offload import offload_optimizer, resolve_schedule

__all__ = [
    "SAVED_OPERATORS",
    "ActivationOffload",
    "BucketedOptimizer",
    "CPUOffloadExecutor",
    "GradientCheckpointing",
    "MemoryConfig",
    "OffloadSchedule",
    "OptimizerInBackward",
    "StateDType",
    "Workers",
    "checkpoint_blocks",
    "cpu_threads",
    "offload_optimizer",
    "overlap_cpu_offload",
    "resolve_schedule",
    "threads_per_rank",
]
