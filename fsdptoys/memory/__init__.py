"""What trades time for memory: each piece is a switch in ``configs/memory``."""

from .activation_offload import ActivationOffload
from .bucketed_optimizer import BucketedOptimizer
from .checkpointing import SAVED_OPERATORS, GradientCheckpointing, checkpoint_blocks
from .compile import compile_blocks
from .config import CPUOffloadExecutor, MemoryConfig, OffloadSchedule, StateDType
from .cpu_offload import Workers, cpu_threads, overlap_cpu_offload, threads_per_rank
from .loss import build_loss, cross_entropy_sum
from .objective import IGNORE_INDEX, Objective
from .optimizer_in_backward import OptimizerInBackward
from .optimizer_offload import offload_optimizer, resolve_schedule

__all__ = [
    "IGNORE_INDEX",
    "SAVED_OPERATORS",
    "ActivationOffload",
    "BucketedOptimizer",
    "CPUOffloadExecutor",
    "GradientCheckpointing",
    "MemoryConfig",
    "Objective",
    "OffloadSchedule",
    "OptimizerInBackward",
    "StateDType",
    "Workers",
    "build_loss",
    "checkpoint_blocks",
    "compile_blocks",
    "cpu_threads",
    "cross_entropy_sum",
    "offload_optimizer",
    "overlap_cpu_offload",
    "resolve_schedule",
    "threads_per_rank",
]
