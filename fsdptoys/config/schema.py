"""The one configuration of a run: a tree of dataclasses, checked across its fields before anything starts.

Each room owns its part of the tree; this page joins them and holds the checks that need more than one room. Nothing
here knows Hydra: the command line composes YAML into these classes and calls ``validate``.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from fsdptoys.checkpoint import CheckpointConfig, open_init_from
from fsdptoys.data import DataConfig
from fsdptoys.device import DEVICE_TYPES, available_cores, float64_collectives
from fsdptoys.errors import ConfigError
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig, OffloadStateDType, resolve_schedule
from fsdptoys.metrics import MetricsConfig
from fsdptoys.models import ModelConfig, MoEConfig
from fsdptoys.optim import OptimConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.float8 import Float8, check_even_shards, check_float8
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.patches import check_patches
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.utils.bounds import MOST_SECONDS, MOST_STEPS, MOST_TOKENS, check_at_least, check_at_most

from .kernel_choice import KernelConfig
from .optimizer_checks import check_blocks, check_in_backward, check_optimizer
from .plan_config import PlanConfig


class DeviceChoice(Enum):
    """Hardware to run on."""

    auto = "auto"
    """CUDA where there is one, else NPU, else CPU."""
    cuda = "cuda"
    npu = "npu"
    cpu = "cpu"


class SumDType(Enum):
    """Number format of sums over ranks that no gradient is in: gradient norms, losses, shares of experts."""

    auto = "auto"
    """float64 where the device's collectives have it, which HCCL's do not; else float32."""
    float32 = "float32"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        """PyTorch's name for it."""
        assert self is not SumDType.auto, "it must have been resolved"
        return torch.float64 if self is SumDType.float64 else torch.float32


@dataclass
class TrainConfig:
    """The loop."""

    batch_size: int = 1
    """Sequences a micro-batch on each rank."""
    seq_len: int = 512
    """Tokens a sequence."""
    steps: int = 10
    """Optimizer steps."""
    grad_accum: int = 1
    """Micro-batches whose gradients are summed before a step."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; null only measures it."""
    max_seconds: float | None = None
    """Stop after the step in which the loop has run this long; null for no limit. Schedules count ``steps`` alone."""
    eval_every: int = 0
    """Evaluate the held-out part after every so many steps, and after the last; 0 for never."""
    eval_batches: int = 8
    """Micro-batches on each rank an evaluation."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over the vocabulary; evaluation does without."""
    z_loss_coef: float = 0.0
    """Weight of logsumexp(logits)², which keeps the logits from drifting; evaluation does without."""
    skip_nonfinite: bool = True
    """Leave a step without update where its loss or gradients are not finite, on all ranks alike."""
    max_skipped: int = 20
    """Stop, with a checkpoint, after so many steps without update in the whole run."""
    max_skipped_in_a_row: int = 5
    """Stop, with a checkpoint, after so many steps without update one after the other."""
    compile: bool = False
    """Compile each block with ``torch.compile``."""
    float8: Float8 = Float8.none
    """Factors of the products in the blocks' linear layers; tensorwise, rowwise: over what a scale is."""
    float8_all_gather: bool = False
    """FSDP2 gathers those weights as float8 (tensorwise only)."""
    deterministic: bool = False
    """Deterministic kernels and float64 reductions: the same bits whatever the layout, on 1, 2, 4, 8, … ranks."""
    sum_dtype: SumDType = SumDType.auto
    """Number format in which gradient norms and losses are added up over ranks; auto: float64, on NPUs float32."""
    seed: int = 0
    """Seed for all purposes that have none of their own."""
    init_seed: int | None = None
    """Seed of initial values."""
    data_seed: int | None = None
    """Seed of the order of the data, and of synthetic data."""
    sample_seed: int | None = None
    """Seed of generation."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        steps = dict.fromkeys(("steps", "eval_every", "max_skipped", "max_skipped_in_a_row"), MOST_STEPS)
        micro_batches = dict.fromkeys(("batch_size", "grad_accum", "eval_batches"), 2**20)
        check_at_most("train", self, seq_len=MOST_TOKENS, z_loss_coef=1e6, **steps, **micro_batches)
        for name in ("seq_len", *micro_batches, "steps", "max_skipped", "max_skipped_in_a_row"):
            check_at_least(f"train.{name}", getattr(self, name), 1)
        check_at_least("train.eval_every", self.eval_every, 0)
        check_at_least("train.z_loss_coef", self.z_loss_coef, 0)
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"train.label_smoothing={self.label_smoothing} must be at least 0 and below 1; "
                "set train.label_smoothing=0.1"
            )
        for name in ("max_grad_norm", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"train.{name}={value} must be a finite number above 0; set train.{name}=null for none"
                )
        for name in ("seed", "init_seed", "data_seed", "sample_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise ConfigError(f"train.{name}={value} must be at least 0 and below 2**63; set train.{name}=0")

    def resolve(self) -> None:
        """Fill in the seeds that have no value of their own."""
        for name in ("init_seed", "data_seed", "sample_seed"):
            if getattr(self, name) is None:
                setattr(self, name, self.seed)


@dataclass
class LaunchConfig:
    """Processes and machines; under torchrun, torchrun's own numbers count instead."""

    device: DeviceChoice = DeviceChoice.auto
    """Hardware to run on."""
    nproc_per_node: int = -1
    """Ranks on this machine; -1 for one a device (two on a CPU)."""
    nnodes: int = 1
    """Machines; the same command runs on each of them."""
    rdzv_endpoint: str | None = None
    """host:port of the machine that the others meet at; needed for more than one machine."""
    rdzv_token_file: str | None = None
    """File of mode 0600 with a secret that all machines share; not used on one machine."""
    timeout_seconds: float = 600.0
    """A collective that takes longer ends the run."""
    max_restarts: int = 0
    """After a lost or failed worker start all of them again, so many times, from the newest checkpoint."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        check_at_most("launch", self, nproc_per_node=10**6, nnodes=10**6, max_restarts=10**6)
        if self.nproc_per_node < 1 and self.nproc_per_node != -1:
            raise ConfigError(
                f"launch.nproc_per_node={self.nproc_per_node} must be at least 1, or -1 for one rank a device; "
                "set launch.nproc_per_node=-1"
            )
        check_at_least("launch.nnodes", self.nnodes, 1)
        check_at_least("launch.max_restarts", self.max_restarts, 0)
        if not 0 < self.timeout_seconds <= MOST_SECONDS:
            raise ConfigError(
                f"launch.timeout_seconds={self.timeout_seconds} must be above 0 and at most {MOST_SECONDS}; "
                "set launch.timeout_seconds=600"
            )
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                f"launch.nnodes={self.nnodes} needs a meeting point; set launch.rdzv_endpoint=HOST:29400 to the "
                "first machine's name"
            )


@dataclass
class Config:
    """Everything that decides a run."""

    model: ModelConfig
    parallel: ParallelConfig
    mesh: MeshConfig
    memory: MemoryConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    profile: ProfileConfig
    debug: DebugConfig
    launch: LaunchConfig
    plan: PlanConfig
    kernels: KernelConfig = field(default_factory=KernelConfig)
    patches: Any = "auto"
    """Fixes of PyTorch to apply, [NAME,...]; auto for those that its version and the strategy need, [] for none."""

    def validate(self, world_size: int, device_type: str, node_ranks: int | None = None) -> None:
        """Replace every ``auto`` by its value and check all rooms against each other, before any worker starts.

        Args:
            world_size: ranks over all machines.
            device_type: ``cuda``, ``npu`` or ``cpu``.
            node_ranks: ranks of one machine; None for all of them.

        Raises:
            ConfigError: the first mistake found, in one sentence naming key, value and fix.
        """
        assert device_type in DEVICE_TYPES
        self.train.resolve()
        self.mesh.resolve(world_size, node_ranks or world_size)
        self._choose_sums(device_type)
        self.parallel.resolve(self.train.deterministic)
        self._check_model()
        train = self.train
        self.kernels.resolve(device_type, compiles=train.compile, deterministic=train.deterministic)
        check_float8(
            train.float8,
            train.float8_all_gather,
            parallel=self.parallel,
            device_type=device_type,
            tokens=train.batch_size * train.seq_len,
            cpu_offload=self.memory.cpu_offload,
        )
        check_optimizer(self.optim, self.parallel, self.memory, train, device_type)
        self.parallel.validate(world_size, self.mesh, device_type, self.memory.cpu_offload)
        check_in_backward(self.optim, self.parallel, self.memory, train, self.mesh, world_size)
        self._check_shards(world_size)
        self._check_memory()
        selective = self.memory.gradient_checkpointing is GradientCheckpointing.selective
        self.kernels.check_documents(self.data.mask_documents, selective)
        self.data.check_documents()
        self.data.validate(self.train.seq_len, self.model.vocab_size)
        self.check_evaluation()
        self._check_going_on()
        self.profile.validate(world_size, device_type, self.train.steps)
        self.debug.validate(self.train.compile, self.kernels.compiles)
        try:
            check_patches(self.patches, self.parallel.name)
        except ValueError as mistake:  # patches know no ConfigError, but their sentences are made the same way
            raise ConfigError(str(mistake)) from mistake
        if self.model.init_from is not None:
            with torch.device("meta"):
                open_init_from(self.model.build())

    @property
    def step_bytes(self) -> int:
        """Host memory of one rank's tokens and labels of a step."""
        sequences = self.train.batch_size * self.train.grad_accum * getattr(self.parallel, "simulated_ranks", 1)
        return 16 * sequences * self.train.seq_len

    def _choose_sums(self, device_type: str) -> None:
        train, has_float64 = self.train, float64_collectives(device_type)
        if train.sum_dtype is SumDType.auto:
            train.sum_dtype = SumDType.float64 if has_float64 else SumDType.float32
        elif train.sum_dtype is SumDType.float64 and not has_float64:
            raise ConfigError(
                f"train.sum_dtype=float64 cannot run on {device_type}, whose collectives have no float64; "
                "set train.sum_dtype=float32"
            )
        elif train.sum_dtype is SumDType.float32 and train.deterministic and has_float64:
            raise ConfigError(
                "train.sum_dtype=float32 contradicts train.deterministic=true, whose norms and losses have the same "
                "bits on any layout, for which they are added up in float64; set train.sum_dtype=auto"
            )

    def _check_model(self) -> None:
        train, model, memory = self.train, self.model, self.memory
        if train.seq_len > model.max_seq_len:
            raise ConfigError(
                f"train.seq_len={train.seq_len} is over the model's model.max_seq_len={model.max_seq_len}; "
                f"set train.seq_len={model.max_seq_len}"
            )
        if self.step_bytes > 2**50:
            raise ConfigError(
                f"train.batch_size={train.batch_size}, train.grad_accum={train.grad_accum} and "
                f"train.seq_len={train.seq_len} make a step's batches {self.step_bytes / 2**50:,.0f} PiB; lower them"
            )
        if memory.checkpoints and memory.checkpointing_start_index >= model.n_layers:
            raise ConfigError(
                f"memory.checkpointing_start_index={memory.checkpointing_start_index} is past the last of the model's "
                f"{model.n_layers} layers; set memory.checkpointing_start_index=0 to checkpoint every block"
            )
        checkpointed = len(range(memory.checkpointing_start_index, model.n_layers, memory.checkpointing_every))
        if memory.activation_offload and checkpointed < 3:
            # The last one's tensors stay, and those of the one before it until they are used.
            raise ConfigError(
                f"memory.activation_offload=true saves nothing with fewer than 3 checkpointed blocks, of which there "
                f"are {checkpointed}; set memory.activation_offload=false"
            )

    def _check_shards(self, world_size: int) -> None:
        """Refuse more shards than most parameters have rows, and shards that states cannot follow."""
        if not self.parallel.uses_dtensor:
            return
        shards, dim = self.mesh.shard_ranks(world_size), self.model.dim
        if shards > dim:
            fitting = max(size for size in range(1, dim + 1) if world_size % size == 0)
            raise ConfigError(
                f"mesh.fsdp_size={self.mesh.fsdp_size} cuts parameters of {dim} rows (model.dim) into {shards} shards, "
                f"so that ranks would hold nothing of them; set mesh.fsdp_size={fitting}"
            )
        check_blocks(self.optim, self.model, self.mesh, shards)
        if self.train.float8_all_gather:
            with torch.device("meta"):
                check_even_shards(self.model.build(), shards)

    def _check_memory(self) -> None:
        memory, parallel = self.memory, self.parallel
        if memory.cpu_offload_executor is CPUOffloadExecutor.overlapped and not parallel.overlaps_cpu_offload:
            raise ConfigError(
                f"memory.cpu_offload_executor=overlapped is not an option of parallel={parallel.name}; set "
                "parallel=fsdp2 or memory.cpu_offload_executor=native"
            )
        if memory.offload_state_dtype is OffloadStateDType.bfloat16 and self.train.deterministic:
            raise ConfigError(
                "memory.offload_state_dtype=bfloat16 draws random numbers on each rank, which train.deterministic=true "
                "rules out; set memory.offload_state_dtype=float32"
            )
        cores = available_cores()
        if memory.cpu_threads is not None and memory.cpu_threads > cores:
            raise ConfigError(
                f"memory.cpu_threads={memory.cpu_threads} is over the {cores} cores of this machine; set "
                f"memory.cpu_threads={cores}"
            )
        if memory.optimizer_offload and not parallel.keeps_whole_states:
            raise ConfigError(
                f"memory.optimizer_offload=true is not an option of parallel={parallel.name}, whose states are cut; "
                "leave it out or set parallel=toy_ddp"
            )
        if memory.optimizer_offload and not self.optim.keeps_states:
            raise ConfigError(
                f"memory.optimizer_offload=true moves states, of which optim={self.optim.name} keeps none as set; "
                "leave it out or set optim.momentum=0.9"
            )
        if memory.optimizer_offload:
            memory.offload_schedule = resolve_schedule(
                memory.offload_schedule, parallel.name, parallel.defers_updates, parallel.reads_unit_by_unit
            )
        if memory.checkpointing_budget is not None and not self.train.compile:
            raise ConfigError(
                f"memory.checkpointing_budget={memory.checkpointing_budget} acts through the compiler; set "
                "train.compile=true"
            )
        if self.train.compile and not parallel.compiles:
            raise ConfigError(
                "train.compile=true passes over every module whose parameters FSDP1 made flat; set "
                "parallel.use_orig_params=true"
            )
        hidden = parallel.hooks_parts_of_blocks or memory.activation_offload or isinstance(self.model, MoEConfig)
        if self.train.compile and memory.gradient_checkpointing is GradientCheckpointing.selective and hidden:
            raise ConfigError(
                "memory.gradient_checkpointing=selective cannot see into what train.compile=true compiles where there "
                "are experts, parallel.wrap=block_attn_mlp or memory.activation_offload=true; set "
                "memory.gradient_checkpointing=full"
            )

    def check_evaluation(self) -> None:
        """Refuse (ConfigError) to evaluate where nothing is held out; of some data, known when it is prepared."""
        train = self.train
        if train.eval_every and not self.data.has_eval:
            raise ConfigError(
                f"train.eval_every={train.eval_every} (typed, or set by the experiment) needs a held-out part, which "
                f"data={self.data.name} does not have as set; set {self.data.eval_fix} or train.eval_every=0"
            )

    def _check_going_on(self) -> None:
        checkpoint = self.checkpoint
        if checkpoint.resume in ("auto", "must") and checkpoint.folder is None and self.metrics.run_dir is None:
            raise ConfigError(
                f"checkpoint.resume={checkpoint.resume} looks for checkpoints in the run directory, which is a new one "
                "each time; set metrics.run_dir=runs/NAME"
            )
        if self.launch.max_restarts and not checkpoint.every:
            raise ConfigError(
                f"launch.max_restarts={self.launch.max_restarts} would start from step 1 each time without "
                "checkpoints; set checkpoint.every=100"
            )

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as plain dicts, lists, strings and numbers."""
        tree: dict[str, Any] = _plain(self)
        return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        # Where a section is one of several kinds, which of them is its name; a model's is that of the preset.
        kind = {"name": value.name} if isinstance(value, (ParallelConfig, DataConfig, OptimConfig)) else {}
        kind |= {"family": value.family} if isinstance(value, ModelConfig) else {}
        return kind | {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
