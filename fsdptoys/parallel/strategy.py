"""The interface between the trainer and a way to train in parallel.

Every strategy wraps a model in the same order:

1. patches of PyTorch are in place; the model is constructed on the meta device (no memory);
2. ``train.float8`` converts linear layers; blocks learn whether they are recomputed and compiled;
3. ``Strategy.split`` leaves this rank its layers, features and experts;
4. ``Strategy.shard`` wraps or shards each block, then ``[norm, lm_head]`` together, then the root.
   It materializes and initializes one parameter after the other, from generators seeded by name
   (``init_weights``) or files;
5. the optimizer is built over the parameters that the strategy leaves.

Gradients are summed over ranks and micro-batches, never averaged: the loss is divided by the number
of valid tokens of the global batch before the backward. A strategy says whether its collectives
average (``gradient_divisor``); the trainer then multiplies the loss by the number of ranks
(``train.gradient_scale``).

In the deterministic mode gradients are reduced after every micro-batch in float64, rounded to
float32, and added up in float32: the bits then depend neither on the layout nor on the order in
which a collective adds. With ``train.deterministic=layout`` models compute by grains
(``exact.ops``) from float64 parameters; gradients are summed over micro-batches and ranks in
float64, never averaged, and rounded to float32 once a step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.models import Context, DecoderModel, StoredBuffer
from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.storages import bytes_beside

from .context import build_context
from .device_mesh import dense_mesh, regular_group
from .gradient_norms import MapParts, norms_in, norms_in_float32, scale_gradients
from .init_weights import ParamInit
from .mesh import CONTEXT_AXIS, Axes
from .pipeline import Pipeline, PipelinedModel
from .state import Load, ReadStates, State, create_stored_states
from .world import World as World
from .wrap import UnitParams
from .wrap import own_parameters as own_parameters


class Strategy(ABC):
    """One way to spread a model and its gradients over ranks."""

    model: nn.Module
    """The module that the trainer calls; set by ``shard``."""
    data_ranks: int
    """Number of micro-batches that run at once; ranks that share sequences have the same one."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences; None if it has full ones."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks that split features with this one; None if it has all."""
    pipeline: Pipeline | None = None
    """The stages of this rank; None if it has all layers."""
    pipelined: PipelinedModel | None = None
    """The model with the stages of all ranks; set by ``shard`` where there is a pipeline."""
    local_data_ranks: int = 1
    """Number of ranks whose micro-batches this process runs one after another."""
    stored_buffers: Sequence[StoredBuffer] = ()
    """The buffers of the model that are weights, the same on all ranks."""
    units_ahead: int = 0
    """Units after its own that a unit's forward begins to gather."""
    sharded: ClassVar[str] = "parameters, gradients and optimizer states"
    """Tensors that the ranks of ``shard_group`` split."""

    def __init__(self, config: Any, world: World) -> None:
        self.config = config
        self.world = world
        self.mesh_axes: Axes = config.axes(world.world_size, world.mesh)
        self.data_ranks = self.mesh_axes.data_ranks
        if self.mesh_axes.cp > 1:
            stride = self.mesh_axes.tp
            self.context_group = regular_group(
                self.mesh_axes.cp, CONTEXT_AXIS, world.timeout, stride
            )

        self.gradient_divisor = world.world_size // self.mesh_axes.pp
        """Ranks over which the collectives average gradients; 1 where they sum. Final after
        ``shard``."""

    @property
    def expert_gradient_divisor(self) -> int:
        """The same for gradients of experts."""
        return self.gradient_divisor

    def divide_expert_gradients(self, divisor: int) -> None:
        """Divide the gradients of experts by a number in the backward, before they are reduced."""
        raise NotImplementedError(
            f"experts are reduced like other parameters, so divisor={divisor}"
        )

    def build_mesh(self) -> DeviceMesh:
        """Lay out the ranks of this rank's stage. A collective."""
        return dense_mesh(self.mesh_axes, self.world.device, self.world.timeout)

    def build_context(self, compiles: bool) -> Context:
        """Return the context in which layers see this rank's part of sequences that ranks share."""
        assert self.context_group is not None
        return build_context(self.config.context, self.context_group, compiles=compiles)

    def split(self, model: DecoderModel, seq_len: int) -> None:  # noqa: B027 (most ranks keep all of a model)
        """Leave this rank its layers, features and experts of a model on the meta device."""

    @abstractmethod
    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Wrap, materialize and initialize a model on the meta device, after ``split``."""

    @property
    def full_model(self) -> nn.Module:
        """The module that gives losses or logits of full models, without gradients. Calling it may
        be a collective."""
        return self.model if self.pipelined is None else self.pipelined

    @abstractmethod
    def microbatch(self, index: int, count: int) -> AbstractContextManager[None]:
        """Context for forward and backward of micro-batch ``index`` of the step's ``count``."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters for the optimizer, with the model's own names where the strategy keeps
        parameters apart."""

    def held_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``named_parameters``, and those frozen ones that are not among them."""
        return self.named_parameters()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of ``named_parameters`` that are not frozen."""
        return (
            (name, param)
            for name, param in self.named_parameters()
            if param.requires_grad
        )

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter in full, once, on the CPU, in any order: in float32, but quantized
        weights as they are.

        A collective: all ranks must exhaust it.
        """

    @abstractmethod
    def units(self) -> list[UnitParams]:
        """Every parameter once, by the module that needs it first, in the order of the forward."""

    def unit_names(self) -> list[list[str]]:
        """Names of the modules of each gathered unit, the root's empty; none where ranks keep all
        parameters."""
        return []

    def gathered_parts(self, name: str) -> int:
        """Number of parts of a parameter; a unit gathers one."""
        return self.mesh_axes.ep if ".experts." in name else 1

    def axes(self) -> dict[str, int]:
        """Mesh axis → ranks along it; ranks that share sequences are among those of the others."""
        group = self.shard_group()
        return self.mesh_axes.sizes(
            self.world.world_size, group.size() if group is not None else 1
        )

    def gradient_bytes(self, trained: list[Tensor], frozen: list[Tensor]) -> int:
        """Bytes of a rank's reduced gradients, from its local tensors of parameters."""
        return bytes_beside(trained, frozen)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 (only who shards updates must exchange them)
        """Receive the optimizer over ``named_parameters`` before its first step."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients after a step."""
        optimizer.zero_grad(set_to_none=True)

    def gather_after(self, module: nn.Module, event: Any) -> None:  # noqa: B027 (only who gathers on streams must wait)
        """Make the gathering of ``module``'s parameters wait for a device event, if not on the
        compute stream."""

    def mirror_parameters(self) -> Callable[[list[nn.Parameter]], None] | None:
        """Upload offloaded parameters in the dtype of the forward, if the strategy can.

        Returns a function to call, from any thread, with updated parameters; None where there are
        no copies.
        """
        return None

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Parameters and optimizer states, with pending updates finished."""
        return State(self.trainable_parameters, optimizer)

    @torch.no_grad()
    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Tensors of ``state``, and stored buffers. A collective."""
        return self.state(optimizer).tensors() | self._buffers()

    @torch.no_grad()
    def load_state_tensors(
        self,
        optimizer: torch.optim.Optimizer,
        load: Load,
        read_states: ReadStates = dict,
    ) -> None:
        """Fill ``state_tensors`` in place with ``load``, and install them; half of them if it
        raises. A collective.

        The optimizer gets the states of ``read_states`` that it would create later.
        """
        create_stored_states(optimizer, self.trainable_parameters(), read_states)
        state = self.state(optimizer)
        tensors = state.tensors()
        # Copies, since FSDP1 installs the buffers of its own state too.
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        load(tensors | buffers)
        state.install(tensors)
        for name, buffer in self._buffers().items():
            buffer.copy_(buffers[name])

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every stored buffer on the CPU in float32."""
        for buffer in self.stored_buffers:
            yield buffer.name, buffer.tensor.detach().to("cpu", torch.float32)

    def _buffers(self) -> dict[str, Tensor]:
        """The live stored buffers by their names in a checkpoint."""
        return {
            f"model.{buffer.name}": buffer.tensor.detach()
            for buffer in self.stored_buffers
        }

    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that shard a gradient among them; None if each rank has it in full."""
        return None

    def spread(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or a tensor of its shape, as a part of the full one: plain or a DTensor,
        sharing its memory."""
        return tensor

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard; 0 where nothing is sharded."""
        return dist.get_rank(group) if (group := self.shard_group()) is not None else 0

    def local_norms(
        self, grads: list[Tensor], map_parts: MapParts = map
    ) -> list[Tensor]:
        """Norms of parts of this rank's gradients, for ``total_norm``; ``map_parts`` is like
        ``map``, over parts.

        An accelerator would write a float64 copy of each part before it reads it, and its host,
        which has offloaded gradients, is many times as slow in float64. So float64 is left to CPUs
        without one, and to the deterministic mode: its norms do not depend on the split.
        """
        if not self.world.deterministic and self.world.device.is_accelerator:
            return norms_in_float32(grads)
        return norms_in(self.world.sum_dtype, grads, map_parts)

    def norm_groups(self) -> list[dist.ProcessGroup | None]:
        """Groups that sum the squares of norms, one after the other."""
        stages = None if self.pipeline is None else self.pipeline.group
        return [self.shard_group(), self.tensor_group, stages]

    def total_norm(self, norms: list[Tensor]) -> Tensor:
        """Norm of all gradients on all ranks, as float32, from norms of this rank's parts. A
        collective."""
        device = self.world.device.torch_device
        sum_dtype = self.world.sum_dtype
        total = torch.zeros((), dtype=sum_dtype, device=device)
        if norms:
            total += (
                torch.cat([norm.flatten() for norm in norms])
                .to(sum_dtype)
                .square()
                .sum()
                .to(device)
            )
        for group in self.norm_groups():
            if group is not None:
                dist.all_reduce(total, group=group)
        return total.sqrt().float()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        scale_by: Callable[[Tensor], None] | None = None,
        map_parts: MapParts = map,
        unscale: float = 1.0,
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return the norm before,
        as float32.

        Gradients of a scaled loss are multiplied by ``unscale`` in the same pass, with
        ``max_norm=inf`` in one. The squares of parts are added up in the world's ``sum_dtype`` and
        rounded once at the end: with parts in float64 the norm is the same number however the
        gradients are sharded. ``scale_by`` receives the factor instead of multiplying the gradients
        here; ``map_parts`` is like ``map``, over parts of gradients, and may use threads.
        """
        grads = [
            local_tensor(param.grad)
            for _, param in self.named_parameters()
            if param.grad is not None
        ]
        norm = self.total_norm(self.local_norms(grads, map_parts))
        norm = norm if unscale == 1 else norm * unscale
        if math.isfinite(max_norm) or unscale != 1:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            scale = scale if unscale == 1 else scale * unscale
            if scale_by is not None:
                scale_by(scale)
            else:
                scale_gradients(grads, scale)
        return norm
