"""Configuration of a run: the packages' sections in one dataclass, and the checks across sections, without Hydra."""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from fsdptoys.checkpoint import CheckpointConfig, open_init_from
from fsdptoys.data import DATASETS, DataConfig
from fsdptoys.device import DEVICE_TYPES, available_cores, float64_collectives
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig, OffloadStateDType, resolve_schedule
from fsdptoys.metrics import MetricsConfig
from fsdptoys.models import MODELS, ModelConfig, MoEConfig
from fsdptoys.optim import OPTIMIZERS, OptimConfig
from fsdptoys.optim.loss_scale import LossScaleConfig
from fsdptoys.parallel import STRATEGIES, ParallelConfig
from fsdptoys.parallel.expert_parallel import check_experts
from fsdptoys.parallel.float8 import check_even_shards, check_float8
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.parallel.precision import SumDType
from fsdptoys.patches import check_patches
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.tune import TUNINGS, TuneConfig

from .context_checks import check_context
from .grain_checks import check_grains
from .kernel_choice import KernelConfig
from .launch_config import LaunchConfig
from .optimizer_checks import check_blocks, check_in_backward, check_loss_scale, check_optimizer
from .option_values import Option
from .pipeline_checks import check_pipeline
from .plan_config import PlanConfig
from .tensor_checks import check_tensor
from .toy_checks import check_toy_context, check_toy_experts
from .train_config import TrainConfig
from .tune_checks import check_tune, open_adapter

EVALUATIONS = 4  # default number of evaluations of a run that tunes a model


@dataclass
class Config:
    """All settings of a run."""

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
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    patches: Any = "auto"
    """PyTorch patches to apply, [NAME,...]; auto for those that its version and the strategy need, [] for none."""

    def count_steps(self, world_size: int) -> str | None:
        """Replace each -1 of ``train`` in a run that tunes a model; return a sentence on the counted steps, or None.

        Reads the prepared data. ConfigError if the counted steps contradict other settings.
        """
        train, sentence = self.train, None
        assert train.data_seed is not None, "the config must have been validated"
        if train.steps == -1:
            rows = len(self.data.build(train.seq_len, self.model.vocab_size, train.data_seed).train)
            ranks = self.parallel.axes(world_size, self.mesh).data_ranks * getattr(self.parallel, "simulated_ranks", 1)
            a_step = train.batch_size * train.grad_accum * ranks
            train.steps = -(-rows // a_step)
            sentence = (
                f"train.steps={train.steps}: one pass over {rows:,} rows of {train.seq_len:,} tokens, {a_step} a step"
            )
            self.profile.validate(world_size, self.launch.device.value, train.steps)
        if train.eval_every == -1:
            train.eval_every = -(-train.steps // EVALUATIONS) if self.data.has_eval else 0
            if train.eval_every and sentence:
                sentence += f"; train.eval_every={train.eval_every}, since a part is held out"
        return sentence

    def validate(self, world_size: int, device_type: str, node_ranks: int | None = None) -> None:
        """Resolve every ``auto``, and check the sections against each other, before any worker starts.

        ``world_size`` counts the ranks of all nodes, ``node_ranks`` those of each; None for a single node. ConfigError
        for the first mistake, in one sentence that names key, value and fix.
        """
        assert device_type in DEVICE_TYPES
        self.train.resolve()
        self.mesh.resolve(world_size, node_ranks or world_size)
        self._choose_sums(device_type)
        self.parallel.resolve(self.train.deterministic)
        self._check_model()
        train = self.train
        self.kernels.resolve(
            device_type,
            compiles=train.compile,
            deterministic=train.deterministic,
            fuses=not self.debug.trace_collectives,
        )
        self.kernels.check_attention(
            device_type,
            self.parallel.param_dtype.torch,
            self.model.head_width,
            masks=self.data.mask_documents,
            deterministic=train.deterministic,
        )
        self.parallel.check_model(self.model)
        check_float8(
            train.float8,
            train.float8_all_gather,
            parallel=self.parallel,
            inner_units=self.parallel.hooks_parts_of_blocks(self.model),
            device_type=device_type,
            tokens=train.batch_size * train.seq_len // self.mesh.cp_size,
            cpu_offload=self.memory.cpu_offload,
        )
        check_tune(self)
        check_loss_scale(self.loss_scale, self.parallel, self.memory, train)
        check_optimizer(self.optim, self.parallel, self.memory, train, device_type)
        self.parallel.validate(world_size, self.mesh, device_type, self.memory.cpu_offload)
        axes = self.parallel.axes(world_size, self.mesh, getattr(self.model, "n_experts", 0))
        check_experts(self.model, axes)
        check_tensor(self, axes)
        check_pipeline(self)
        check_context(
            self.parallel,
            self.mesh,
            self.model,
            self.kernels,
            seq_len=train.seq_len,
            masks=self.data.mask_documents,
            device_type=device_type,
        )
        check_grains(self, world_size, device_type)
        check_in_backward(self.optim, self.parallel, self.memory, train, self.mesh, world_size)
        self._check_shards(world_size)
        self._check_memory()
        facts = (self.kernels.attention.value, train.seq_len, train.compile)
        check_toy_context(self.parallel, self.mesh, self.model, *facts)
        check_toy_experts(self.parallel, self.mesh, train.compile)
        selective = self.memory.gradient_checkpointing is GradientCheckpointing.selective
        self.kernels.check_documents(self.data.mask_documents, selective)
        self.data.check_documents()
        self.data.validate(self.train.seq_len, self.model.vocab_size)
        self.check_evaluation()
        self._check_resume()
        if self.train.steps != -1:
            self.profile.validate(world_size, device_type, self.train.steps)
        self.debug.validate(self.train.compile, self.kernels.compiles)
        try:
            check_patches(self.patches, self.parallel.name)
        except ValueError as mistake:  # patches do not import ConfigError, but word their messages alike
            raise ConfigError(str(mistake)) from mistake
        if self.model.init_from is not None or self.tune.freezes:
            with torch.device("meta"):
                model = self.model.build()
            if self.model.init_from is not None:
                open_init_from(model)
            open_adapter(self.tune, model)

    @property
    def step_bytes(self) -> int:
        """Host memory of one rank's tokens and labels per step, in bytes."""
        sequences = self.train.batch_size * self.train.grad_accum * getattr(self.parallel, "simulated_ranks", 1)
        return 16 * sequences * self.train.seq_len

    @property
    def scales_gradients(self) -> bool:
        """Whether the gradients of a step are multiplied by a factor: to clip them, or to undo the loss scale."""
        return self.train.max_grad_norm is not None or self.parallel.param_dtype.needs_loss_scale

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
                f"train.sum_dtype=float32 contradicts train.deterministic={train.deterministic.word}, whose norms and "
                "losses have the same bits on any layout, for which they are added up in float64; set "
                "train.sum_dtype=auto"
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
            # The last block's tensors stay on the device, and those of the block before until they are used.
            raise ConfigError(
                f"memory.activation_offload=true saves nothing with fewer than 3 checkpointed blocks, of which there "
                f"are {checkpointed}; set memory.activation_offload=false"
            )

    def _check_shards(self, world_size: int) -> None:
        """Refuse more shards than rows, and shards that optimizer states or float8 all-gathers cannot follow."""
        key, stages, count = "parallel.reduce_each_microbatch=true", self.mesh.pp_size, self.train.grad_accum
        if self.parallel.reduces_often and stages > 1:
            raise UnusedKeyError(
                f"{key} does nothing with mesh.pp_size={stages}, whose stages reduce once a step; leave it out"
            )
        if self.parallel.reduces_often and count == 1:
            raise UnusedKeyError(f"{key} does nothing with train.grad_accum=1; set train.grad_accum=2 or leave it out")
        if not self.parallel.uses_dtensor:
            return
        shards, dim = self.mesh.shard_ranks(world_size), self.model.dim
        if shards > dim:
            fitting = max(size for size in range(1, dim + 1) if world_size % size == 0)
            raise ConfigError(
                f"mesh.fsdp_size={self.mesh.fsdp_size} cuts parameters of {dim} rows (model.dim) into {shards} shards, "
                f"so that ranks would hold nothing of them; set mesh.fsdp_size={fitting}"
            )
        check_blocks(self.optim, self.model, self.mesh, self.parallel.axes(world_size, self.mesh))
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
                "memory.offload_state_dtype=bfloat16 draws random numbers on each rank, which train.deterministic="
                f"{self.train.deterministic.word} rules out; set memory.offload_state_dtype=float32"
            )
        cores = available_cores()
        if memory.cpu_threads is not None and memory.cpu_threads > cores:
            raise ConfigError(
                f"memory.cpu_threads={memory.cpu_threads} is over the {cores} cores of this node; set "
                f"memory.cpu_threads={cores}"
            )
        if memory.optimizer_offload and not parallel.keeps_full_states:
            fix = "leave it out or set parallel=toy_ddp" if self.mesh.ep_size == 1 else "leave it out"
            raise ConfigError(
                f"memory.optimizer_offload=true is not an option of parallel={parallel.name}, whose states are cut; "
                + fix
            )
        if memory.optimizer_offload and not self.optim.state_widths:
            raise ConfigError(
                f"memory.optimizer_offload=true moves states, of which optim={self.optim.name} keeps none as set; "
                "leave it out or set optim.momentum=0.9"
            )
        if memory.optimizer_offload:
            memory.offload_schedule = resolve_schedule(memory.offload_schedule, parallel.name, parallel.defers_updates)
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
        selective = memory.gradient_checkpointing is GradientCheckpointing.selective
        hidden = memory.activation_offload or isinstance(self.model, MoEConfig)
        hidden = hidden or self.mesh.cp_size * self.mesh.tp_size > 1
        if self.train.compile and selective and (hidden or parallel.hooks_parts_of_blocks(self.model)):
            raise ConfigError(
                "memory.gradient_checkpointing=selective cannot see into blocks compiled by train.compile=true with "
                "experts, units within a block, memory.activation_offload=true, or mesh.cp_size or mesh.tp_size above "
                "1; set memory.gradient_checkpointing=full"
            )

    def check_evaluation(self) -> None:
        """Check that the data has a held-out split if ``eval_every`` is set; some data knows it only once prepared."""
        train = self.train
        if train.eval_every > 0 and not self.data.has_eval:
            raise ConfigError(
                f"train.eval_every={train.eval_every} (typed, or set by the experiment) needs a held-out part, which "
                f"data={self.data.name} does not have as set; set {self.data.eval_fix} or train.eval_every=0"
            )

    def _check_resume(self) -> None:
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
        """The full tree as dicts, lists, strings and numbers."""
        return dict(_plain(self))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        # In sections with several dataclasses, ``name`` says which one; a model's ``name`` is its preset.
        kind = {"name": value.name} if isinstance(value, (ParallelConfig, DataConfig, OptimConfig, TuneConfig)) else {}
        kind |= {"family": value.family} if isinstance(value, ModelConfig) else {}
        return kind | {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


SCHEMAS: dict[str, dict[str, type]] = {
    "model": dict(MODELS),
    "parallel": dict(STRATEGIES),
    "mesh": {"full": MeshConfig},
    "memory": {"none": MemoryConfig},
    "data": dict(DATASETS),
    "optim": dict(OPTIMIZERS),
    "tune": dict(TUNINGS),
    "checkpoint": {"default": CheckpointConfig},
    "metrics": {"default": MetricsConfig},
}
"""Group → name of the ``base_<name>`` schema → dataclass."""

ROOT_OPTIONS = {
    field.name: Option(Any, field.default)
    for field in dataclasses.fields(Config)
    if field.default is not dataclasses.MISSING
}
"""Keys outside of any section."""
