"""What the trainer asks of every way to train in parallel, and the settings that all of them share.

The order of wrapping, the same for every strategy:

1. patches of PyTorch are in place; the model is constructed on the meta device (no memory);
2. ``train.float8`` converts linear layers, gradient checkpointing replaces the blocks' forwards, ``train.compile``
   compiles them;
3. ``Strategy.parallelize`` wraps or shards: each block, then ``[norm, lm_head]`` together, then the root;
4. it materialises and fills one parameter after the other, from generators seeded by name (``initialise``) or files;
5. the optimizer is built over what the strategy left as parameters.

Gradients are summed over ranks and micro-batches, never averaged: the loss is divided by the number of valid tokens of
the whole global batch before the backward. PyTorch's strategies average, so the loss is multiplied by the number of
ranks (``loss_scale``), which is exact for powers of two.

In the deterministic mode gradients are reduced after every micro-batch in float64, rounded to float32, and added up in
float32: the bits then depend neither on the layout nor on the order in which a collective adds.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.device import Device, float64_collectives
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.utils.dtensor import (
    local_tensor,
)

from . import state
from .init_weights import Fill
from .mesh import (
    MeshConfig,
    build_mesh,
)
from .precision import DType, ReduceDType

Unit = tuple[nn.Module, list[nn.Parameter]]
"""A module, and the parameters that its forward is the first to need."""

NORM_ELEMENTS = 2**22
"""Elements of a gradient that are squared at a time."""
CPU_NORM_ELEMENTS = 2**18
"""The same on a CPU, which makes a float64 copy of them: 2 MiB, that stay in cache. With 32 MiB it took six times as
long."""


@dataclass
class ParallelConfig(ABC):
    """What every strategy has."""

    name: ClassVar[str]
    """The word after ``parallel=``."""
    single_process: ClassVar[bool] = False
    """Whether one process trains alone."""
    shards_parameters: ClassVar[bool] = False
    """Whether each of ``mesh.fsdp_size`` ranks holds a shard of every parameter, and gathers it where needed."""
    flattens_parameters: ClassVar[bool] = False
    """Whether a unit is one module whose parameters are concatenated into a flat one."""
    overlaps_cpu_offload: ClassVar[bool] = False
    """Whether ``memory.cpu_offload_executor=overlapped`` can update offloaded parameters during the next forward."""

    param_dtype: DType = DType.float32
    """Number format of forward and backward; parameters and optimizer states stay float32."""
    buffer_dtype: DType = DType.float32
    """Number format of the model's buffers: rotary frequencies; bf16 makes the angles of late positions wrong."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether the optimizer sees the model's own parameters, so that they can be grouped."""
        return True

    @property
    def defers_updates(self) -> bool:
        """Whether parameters may be updated as late as the next forward, unit by unit."""
        return True

    @property
    def reads_unit_by_unit(self) -> bool:
        """Whether the forward reads parameters as late as their module needs them."""
        return True

    @property
    def keeps_whole_states(self) -> bool:
        """Whether optimizer states can be moved by the parameters that they belong to: memory.optimizer_offload."""
        return True

    @property
    def matrices_lost(self) -> str | None:
        """What it does to matrices, so that rows are not whole for Muon and states of few bits; None for nothing."""
        return None

    @property
    def gradients_held(self) -> str | None:
        """What it does with gradients, so that none can be used up in the backward; None for nothing."""
        return "gives them to the optimizer after the whole backward"

    @property
    def hooks_parts_of_blocks(self) -> bool:
        """Whether the strategy puts hooks on parts of a block, besides the block."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether the compiler takes blocks as this strategy leaves them."""
        return True

    def resolve(self, deterministic: bool) -> None:  # noqa: B027 (not every strategy has such settings)
        """Replace settings that say ``auto`` by what they stand for."""

    def validate(  # noqa: B027 (nor does every strategy refuse something)
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Check this strategy against what else is chosen.

        Raises:
            ConfigError: naming key, value and fix.
        """

    @abstractmethod
    def build(self, context: "ParallelContext") -> "Strategy":
        """Construct the strategy, once the process group is up."""

    def _refuse_sharding(self, mesh: MeshConfig) -> None:
        if mesh.fsdp_size not in (-1, 1):
            raise ConfigError(
                f"mesh.fsdp_size={mesh.fsdp_size} shards parameters, which parallel={self.name} does not; "
                "set parallel=fsdp2 or mesh.fsdp_size=-1"
            )

    def _refuse_cpu_offload(self, cpu_offload: bool) -> None:
        if cpu_offload:
            raise ConfigError(
                f"memory.cpu_offload=true is not an option of parallel={self.name}; "
                "set parallel=fsdp2 or memory.cpu_offload=false"
            )


@dataclass
class ReducingConfig(ParallelConfig):
    """What every strategy of several ranks has."""

    reduce_dtype: ReduceDType = ReduceDType.auto
    """Number format in which gradients are summed over ranks."""

    def resolve(self, deterministic: bool) -> None:
        """Choose the number format of reductions."""
        if deterministic and self.reduce_dtype not in (ReduceDType.auto, ReduceDType.float64):
            raise ConfigError(
                f"parallel.reduce_dtype={self.reduce_dtype.value} contradicts train.deterministic=true, which reduces "
                "in float64; set parallel.reduce_dtype=auto"
            )
        self.reduce_dtype = self.reduce_dtype.resolve(deterministic)

    def validate(self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool) -> None:
        """Refuse reductions that the device's collectives do not have."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        if self.reduce_dtype is ReduceDType.float64 and not float64_collectives(device_type):
            raise ConfigError(
                f"parallel.reduce_dtype=float64 (train.deterministic=true asks for it) cannot run on {device_type}, "
                "whose collectives have no float64; set train.deterministic=false and parallel.reduce_dtype=float32"
            )


@dataclass(frozen=True)
class ParallelContext:
    """Where a strategy runs."""

    device: Device
    rank: int
    world_size: int
    mesh: MeshConfig
    deterministic: bool = False
    cpu_offload: bool = False
    sum_dtype: torch.dtype = torch.float64
    timeout: timedelta | None = None
    """Of collectives in groups that the strategy makes; None for PyTorch's own."""

    def build_mesh(self) -> DeviceMesh:
        """The ranks laid out as ``mesh`` says."""
        return build_mesh(self.mesh, self.world_size, self.device, self.timeout)


class Strategy(ABC):
    """One way to spread a model and its gradients over ranks."""

    model: nn.Module
    """What the trainer calls; set by ``parallelize``."""
    data_ranks: int
    """Over how many ranks' micro-batches a gradient is summed."""
    local_data_ranks: int = 1
    """Micro-batches of how many ranks this process runs one after another."""

    def __init__(self, context: ParallelContext) -> None:
        self.context = context
        self.data_ranks = context.world_size

    frees_gradients: bool = True
    """Whether gradients may be set to None after a step, rather than to zero."""
    units_ahead: int = 0
    """How many units after its own a unit's forward begins to gather."""

    @property
    def loss_scale(self) -> float:
        """Factor on the loss that turns the strategy's averaging over ranks into a sum."""
        return float(self.context.world_size)

    @abstractmethod
    def parallelize(self, model: DecoderModel, fill: Fill) -> None:
        """Wrap and materialise a model that was constructed on the meta device; ``fill`` gives it initial values."""

    @abstractmethod
    def microbatch(self, index: int, count: int) -> AbstractContextManager[None]:
        """Surround forward and backward of the micro-batch numbered ``index`` of the step's ``count``."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters for the optimizer, with the model's own names where the strategy keeps them apart."""

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, once, as float32 on the CPU, one at a time, in any order.

        A collective: all ranks must exhaust it.
        """

    @abstractmethod
    def units(self) -> list[Unit]:
        """Every parameter once, by the module whose forward needs it first, in the order of the forward."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 (only who shards updates must exchange them)
        """Be told of the optimizer over ``named_parameters``, before its first step."""

    def gather_after(self, module: nn.Module, event: Any) -> None:  # noqa: B027 (only who gathers on streams must wait)
        """Let what gathers parameters for ``module``'s forward wait for an event of the device's module.

        Where parameters are read on the computing stream, whoever updated them there has waited already.
        """

    def mirror_parameters(self) -> Callable[[list[nn.Parameter]], None] | None:
        """Let offloaded parameters travel in the number format of the forward, where the strategy can.

        Returns:
            What to call, from any thread, with parameters that were updated; None where nothing is to be kept up.
        """
        return None

    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Parameters and optimizer states, as ``state.state_tensors`` names them. A collective."""
        return state.state_tensors(self.model, self.named_parameters, optimizer)

    def load_state_tensors(self, optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Tensor]], None]) -> None:
        """Let ``load`` fill the tensors of ``state_tensors`` in place, and install them. A collective."""
        state.load_state_tensors(self.model, self.named_parameters, optimizer, load)

    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks whose local gradients together make one whole gradient; None where each has the whole."""
        return None

    @property
    def shard_rank(self) -> int:
        """Which shard this rank holds; 0 where each holds the whole."""
        group = self.shard_group()
        return dist.get_rank(group) if group is not None else 0

    def part_norm(self, part: Tensor) -> Tensor:
        """Norm of a part of a gradient, in the context's ``sum_dtype``."""
        return torch.linalg.vector_norm(part, dtype=self.context.sum_dtype)

    def total_norm(self, norms: list[Tensor]) -> Tensor:
        """Norm of all gradients on all ranks, as float32, from those of this rank's parts. A collective."""
        device = self.context.device.torch_device
        total = torch.zeros((), dtype=self.context.sum_dtype, device=device)
        if norms:
            total += torch.stack(norms).square().sum().to(device)
        group = self.shard_group()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total.sqrt().float()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        scale_by: Callable[[Tensor], None] | None = None,
        map_parts: Callable[[Callable[[Tensor], Tensor], list[Tensor]], Iterable[Tensor]] = map,
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return the norm before, as float32.

        The squares are added up in the context's ``sum_dtype`` and rounded once at the end: in float64 the norm is
        then the same number however the gradients are sharded. ``max_norm`` of infinity only measures.

        Args:
            max_norm: the largest norm that is left as it is.
            scale_by: takes the factor instead of the gradients being multiplied by it here.
            map_parts: applies a function to parts of gradients, in order, as ``map`` does; may use threads.
        """
        grads = [local_tensor(param.grad) for _, param in self.named_parameters() if param.grad is not None]
        parts = [part for grad in grads for part in grad_parts(grad)]
        norm = self.total_norm(list(map_parts(self.part_norm, parts)))
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if scale_by is not None:
                scale_by(scale)
            else:
                for grad in grads:
                    scale = scale.to(grad.device)  # one wait for the device, where gradients are offloaded
                    grad.mul_(scale)
        return norm


def grad_parts(grad: Tensor) -> list[Tensor]:
    """What this rank holds of a gradient, cut into parts whose norms are taken at a time."""
    return [part for part in grad.flatten().split(norm_elements(grad.device.type)) if part.numel()]


def norm_elements(device_type: str) -> int:
    """Elements of a gradient whose norm is taken at a time."""
    return CPU_NORM_ELEMENTS if device_type == "cpu" else NORM_ELEMENTS


def own_parameters(modules: list[list[nn.Module]]) -> list[list[nn.Parameter]]:
    """Parameters of each group of modules that no later group has; give outer modules before those within them."""
    seen: set[nn.Parameter] = set()
    owned: list[list[nn.Parameter]] = []
    for group in reversed(modules):
        params = [param for module in group for param in module.parameters()]
        owned.append([param for param in dict.fromkeys(params) if param not in seen])
        seen.update(params)
    return owned[::-1]
