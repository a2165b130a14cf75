"""The sections of a configuration in one dataclass."""

from dataclasses import dataclass, field
from typing import Any

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.data import DataConfig
from fsdptoys.loss import CrossEntropyConfig, LossConfig
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics import MetricsConfig
from fsdptoys.models import ModelConfig
from fsdptoys.optim import OptimConfig
from fsdptoys.optim.loss_scale import LossScaleConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.tune import TuneConfig

from .kernel_choice import KernelConfig
from .launch_config import LaunchConfig
from .plan_config import PlanConfig
from .train_config import TrainConfig


@dataclass
class Sections:
    """All settings of a run; ``schema.Config`` checks them."""

    model: ModelConfig
    parallel: ParallelConfig
    mesh: MeshConfig
    memory: MemoryConfig
    data: DataConfig
    optim: OptimConfig
    tune: TuneConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    profile: ProfileConfig
    debug: DebugConfig
    launch: LaunchConfig
    plan: PlanConfig
    kernels: KernelConfig = field(default_factory=KernelConfig)
    loss: LossConfig = field(default_factory=CrossEntropyConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    writers: dict[str, Any] = field(default_factory=dict)
    """Name in ``metrics.writers`` → its options, ``writers.NAME.KEY``."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Name in ``train.callbacks`` → its options, ``callbacks.NAME.KEY``."""
    patches: Any = "auto"
    """PyTorch patches to apply, [NAME,...]; auto for those that its version and the strategy need,
    [] for none."""

    @property
    def step_bytes(self) -> int:
        """Host memory of one rank's tokens and labels per step, in bytes."""
        sequences = (
            self.train.batch_size
            * self.train.grad_accum
            * getattr(self.parallel, "simulated_ranks", 1)
        )
        return 16 * sequences * self.train.seq_len
