"""Settings that all strategies share."""

from dataclasses import dataclass
from typing import ClassVar

from fsdptoys.device import float64_collectives
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.utils.options import Effect, Stage, check_options, option

from .capabilities import Capabilities
from .context import ContextForm
from .determinism import Deterministic
from .mesh import Axes, MeshConfig
from .precision import DType, ReduceDType
from .strategy import Strategy
from .world import World


@dataclass
class ParallelConfig:
    """Settings of every strategy.

    Nothing outside this package compares ``name``: ``capabilities`` says what differs.
    """

    name: ClassVar[str]
    """The word after ``parallel=``."""
    strategy: ClassVar[type[Strategy]]
    """Class that these settings configure."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    """What the strategy can do; it refuses all other settings."""

    param_dtype: DType = option(
        DType.float32,
        effect=Effect.format,
        alias="dtype torch_dtype precision mixed_precision amp param_dtype",
    )
    """dtype of forward and backward; parameters and optimizer states stay float32."""
    buffer_dtype: DType = option(DType.float32, effect=Effect.format)
    """dtype of the model's buffers: rotary frequencies; bf16 makes the angles of late positions
    wrong."""

    def __post_init__(self) -> None:
        check_options("parallel", self)

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduced after each micro-batch; False if that cannot be chosen."""
        return False

    def hooks_parts_of_blocks(self, model: ModelConfig) -> bool:
        """Whether the strategy puts hooks on parts of a block of this model."""
        return False

    def check_model(self, model: ModelConfig) -> None:
        """Check settings that name parts of the model.

        Raises:
            ConfigError: naming key, value and fix.
        """

    def resolve(self, deterministic: Deterministic | bool) -> None:
        """Replace every ``auto`` by its value."""

    def validate(
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Check this strategy against the world and other settings.

        Raises:
            ConfigError: naming key, value and fix.
        """
        can = self.capabilities
        if can.single_process and world_size != 1:
            raise ConfigError(
                f"parallel={self.name} runs one process, the world size is {world_size}; set "
                "parallel=ddp or launch.nproc_per_node=1"
            )
        if can.shards_parameters:
            mesh.shard_ranks(world_size)  # which must divide the ranks
        elif can.owns_parameters:
            if mesh.fsdp_size not in (-1, world_size):
                raise ConfigError(
                    f"mesh.fsdp_size={mesh.fsdp_size} replicates, which parallel={self.name} "
                    "does not; set parallel=fsdp2 or mesh.fsdp_size=-1"
                )
        elif mesh.fsdp_size not in (-1, 1):
            raise ConfigError(
                f"mesh.fsdp_size={mesh.fsdp_size} shards parameters, which parallel={self.name} "
                "does not; set parallel=fsdp2 or mesh.fsdp_size=-1"
            )

    def axes(self, world_size: int, mesh: MeshConfig, experts: int = 0) -> Axes:
        """Sizes of the mesh axes; a suggested ``mesh.ep_size`` divides ``experts``.

        Raises:
            ConfigError: if they do not divide, or this strategy has no such axis.
        """
        can = self.capabilities
        for key, has in (
            ("cp_size", bool(can.context_forms)),
            ("ep_size", can.splits_experts),
            ("tp_size", can.splits_features),
            ("pp_size", can.splits_layers),
        ):
            size = getattr(mesh, key)
            if size > 1 and not has:
                fix = (
                    f"mesh.{key}=1"
                    if world_size % size
                    else f"parallel=fsdp2 or mesh.{key}=1"
                )
                raise ConfigError(
                    f"mesh.{key}={size} is not an option of parallel={self.name}; set {fix}"
                )
        return mesh.axes(world_size, can.shards_parameters, experts)

    def build(self, world: World) -> Strategy:
        """Construct the strategy; the process group must be initialized."""
        return self.strategy(self, world)


@dataclass
class ReducingConfig(ParallelConfig):
    """Settings of every strategy of several ranks."""

    reduce_dtype: ReduceDType = option(
        ReduceDType.auto, effect=Effect.rounding, acts=Stage.gradient
    )
    """dtype in which gradients are summed over ranks."""
    context: ContextForm = option(
        ContextForm.auto, effect=Effect.rounding, needs="mesh.cp_size"
    )
    """Communication of attention where ranks share sequences (``mesh.cp_size``)."""

    def resolve(self, deterministic: Deterministic | bool) -> None:
        """Choose the dtype of reductions."""
        if deterministic and self.reduce_dtype not in (
            ReduceDType.auto,
            ReduceDType.float64,
        ):
            raise ConfigError(
                f"parallel.reduce_dtype={self.reduce_dtype.value} contradicts "
                f"train.deterministic={Deterministic(deterministic).word}, which reduces in "
                "float64; set parallel.reduce_dtype=auto"
            )
        if self.reduce_dtype is ReduceDType.auto:
            self.reduce_dtype = (
                ReduceDType.float64 if deterministic else ReduceDType.float32
            )

    def validate(
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Check that the device's collectives have the dtype of reductions."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        if self.reduce_dtype is ReduceDType.float64 and not float64_collectives(
            device_type
        ):
            raise ConfigError(
                "parallel.reduce_dtype=float64 (train.deterministic=true or layout asks for it) "
                f"cannot run on {device_type}, whose collectives have no float64; set "
                "train.deterministic=false and parallel.reduce_dtype=float32"
            )
