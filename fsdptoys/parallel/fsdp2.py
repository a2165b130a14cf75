"""FSDP2: PyTorch's ``fully_shard``, which shards every parameter along its first dim as a DTensor.

Stacks of experts are sharded along another dim where the ranks do not divide their number. A mesh
of two axes makes it HSDP: sharded along the second, replicated and all-reduced along the first.
Under expert parallelism the stacks are units over a mesh of their own (``expert_parallel``). Under
tensor parallelism each rank shards the part of every parameter that has its features
(``tensor_parallel``); experts are sharded over all ranks of a copy.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, MoEConfig
from fsdptoys.models.moe import Experts
from fsdptoys.utils.dtensor import full_tensor, is_dtensor, local_tensor, unwrapped
from fsdptoys.utils.options import Effect, option

from . import device_mesh
from .capabilities import FORMS, MIXES_DTYPES, TORCH, Capabilities
from .cpu_offload_cast import mirror_parameters
from .expert_parallel import (
    ExpertExchange,
    expert_placement,
    split_experts,
    sums_gradients,
)
from .fsdp import FSDPConfig
from .fsdp2_internals import gathering_stream, group_averages, keep_gradient_dtype
from .fsdp2_units import set_prefetch, unit_policies
from .gradient_norms import MapParts
from .init_weights import ParamInit, init_buffers, materialize
from .mesh import (
    EXPERT_AXIS,
    EXPERT_SHARD_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    MeshConfig,
)
from .pipeline import Pipeline, PipelinedModel, PipelineSchedule
from .placement import placement
from .precision import DType, ReduceDType
from .state import State, unrounded
from .strategy import Strategy, UnitParams, World, own_parameters
from .tensor_parallel import FeatureSplit, TensorExchange
from .wrap import Unit, inside_out


class FSDP2(Strategy):
    """PyTorch's or the toy's ``fully_shard``."""

    config: FSDPConfig

    def __init__(self, config: FSDPConfig, world: World) -> None:
        super().__init__(config, world)
        self.features: FeatureSplit | None = None
        if self.mesh_axes.pp > 1:
            assert isinstance(config, FSDP2Config)
            groups = device_mesh.build_pipe_groups(self.mesh_axes, world.timeout)
            loss_dtype = (
                torch.float64 if world.deterministic.covers_layouts else torch.float32
            )
            dtypes = config.param_dtype.torch, loss_dtype
            self.pipeline = Pipeline(
                config.schedule,
                groups,
                self.mesh_axes,
                dtypes,
                world.device.torch_device,
            )
        self.mesh = self.build_mesh()
        if self.mesh_axes.tp > 1:
            whole = device_mesh.tensor_axis_first(
                self.mesh, self.mesh_axes, world.device
            )
            self.tensor_group = self.mesh.get_group(TENSOR_AXIS)
            self.features = FeatureSplit(TensorExchange(self.tensor_group), whole)
            own_axes = (*self.mesh_axes.copies, SHARD_AXIS)
            self.mesh = self.mesh[own_axes]
        self.units_ahead = config.forward_prefetch
        # FSDP2 divides by itself in float64, and asks the collective for the mean otherwise.
        averages = config.reduce_dtype is ReduceDType.float64 or group_averages(
            self.shard_group()
        )
        if averages and not world.deterministic.uses_float64:
            self.gradient_divisor = (
                world.world_size // self.mesh_axes.pp // self.mesh_axes.tp
            )
        else:
            self.gradient_divisor = 1
        self.sparse_mesh: DeviceMesh | None = None
        if self.mesh_axes.ep > 1:
            # The host waits for the splits of an exchange, so the device's queue is no help.
            self.units_ahead = max(1, self.units_ahead)

    @property
    def library(self) -> Any:
        """Module of ``fully_shard`` and its policies."""
        import torch.distributed.fsdp

        return torch.distributed.fsdp

    @property
    def expert_gradient_divisor(self) -> int:
        """Number of ranks with the same experts; 1 if gradients are summed."""
        return max(1, self.gradient_divisor // self.mesh_axes.ep)

    def divide_expert_gradients(self, divisor: int) -> None:
        """Divide them where experts get their parameters."""
        self._exchange.gradient_divisor = divisor

    def split(self, model: DecoderModel, seq_len: int) -> None:
        """Leave this rank its stages, features and experts."""
        if self.pipeline is not None:
            self.pipeline.cut(model, seq_len)
        splits_experts = self.mesh_axes.ep > 1
        # In some stage: all sum gradients, or average them.
        has_experts = isinstance(model.config, MoEConfig)
        if splits_experts or (self.features is not None and has_experts):
            self.sparse_mesh = device_mesh.sparse_mesh(
                self.mesh_axes, self.world.device, self.world.timeout
            )
        if self.features is not None:
            self.features.apply(model)
        if splits_experts:
            assert self.sparse_mesh is not None
            self._exchange = ExpertExchange(self.sparse_mesh.get_group(EXPERT_AXIS))
            split_experts(model, self.sparse_mesh[EXPERT_AXIS], self._exchange)

    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Shard the units from the inside out, then the root; materialize only the shards."""
        # Blocks add to the residual stream out of place, so a view does no harm.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        self._shard_units(model)
        device = self.world.device.torch_device
        memory = torch.device("cpu") if self.world.cpu_offload else device
        materialize(
            model,
            memory,
            lambda param, name: param_init(self.spread(name, param), name),
        )
        config = self.config
        init_buffers(model, device, config.buffer_dtype.torch, config.param_dtype.torch)
        self.model = model
        if self.pipeline is not None:
            self.pipelined = PipelinedModel(model, self.pipeline)

    def _shard_units(self, model: DecoderModel) -> None:
        """Make the units, and set the order in which they are prefetched."""
        library = self.library
        policies = unit_policies(library, self.config, self.world)
        float32_policies = unit_policies(library, self.config, self.world, float32=True)
        shard_dim = functools.partial(placement, ranks=self.mesh[SHARD_AXIS].size())
        dense = {"mesh": self.mesh, "shard_placement_fn": shard_dim}
        units = {
            unit.modules[0]: unit
            for unit in self.config.units(model, self.sparse_mesh is not None)
        }
        members: dict[str, list[Any]] = {
            name: [model.get_submodule(member) for member in unit.modules]
            for name, unit in units.items()
        }
        for name in inside_out(list(units)):
            sparse = self.sparse_mesh is not None and isinstance(
                members[name][0], Experts
            )
            view = self._sparse_view() if sparse else dense
            library.fully_shard(
                members[name],
                reshard_after_forward=self._reshards(units[name]),
                **view,
                **(float32_policies if units[name].float32 else policies),
            )
            if units[name].embeds:
                # The gradient of an embedding needs the indices only.
                members[name][0].set_unshard_in_backward(False)
        # The root gets the remaining parameters.
        library.fully_shard(
            model, reshard_after_forward=self._reshards(None), **dense, **policies
        )
        roots = [model, *(modules[0] for modules in members.values())]
        for module in roots:
            keep_gradient_dtype(module)
        if self.sparse_mesh is not None or self.world.deterministic.uses_float64:
            self._sum_gradients(roots)
        # The root's forward begins before any other.
        self._modules: list[list[nn.Module]] = [[model], *members.values()]
        tied = bool(units) and next(iter(units.values())).ends_forward
        config = self.config
        ahead = self.units_ahead if self.mesh_axes.ep > 1 else config.forward_prefetch
        first_modules = [modules[0] for modules in members.values()]
        set_prefetch(first_modules, ahead, config.backward_prefetch, tied)

    def _reshards(self, unit: Unit | None) -> bool:
        """Whether a unit is freed after its forward: in a pipeline, other micro-batches follow at
        once."""
        return self.pipeline is None and self.config.reshards(unit)

    def _sparse_view(self) -> dict[str, Any]:
        """Mesh and placement of the experts' units."""
        mesh = self.sparse_mesh
        assert mesh is not None
        axes = (*self.mesh_axes.copies, EXPERT_SHARD_AXIS)
        shard_dim = expert_placement if self.mesh_axes.ep > 1 else placement
        return {
            "mesh": mesh[axes],
            "shard_placement_fn": functools.partial(
                shard_dim, ranks=self.mesh_axes.efsdp
            ),
        }

    def _sum_gradients(self, units: list[Any]) -> None:
        """Sum gradients: averages would divide those of experts by fewer ranks than the rest, and
        others inexactly.

        Sums also keep the bits of one process on any number of ranks; averages need a power of two.
        If this torch cannot sum, ``expert_gradient_divisor`` is the divisor of experts.
        """
        if sums_gradients(units):
            self.gradient_divisor = 1
        assert self.features is None or self.gradient_divisor == 1, (
            "the configuration was not validated"
        )

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce-scatter once a step, with the last micro-batch, or after each; all-reduce over
        replicas once.

        In the deterministic mode both are done after each.
        """
        model: Any = self.model
        last = index == count - 1
        exact = self.world.deterministic.reduces_each_microbatch
        model.set_requires_gradient_sync(
            last or exact or self.config.reduce_each_microbatch
        )
        if self.mesh_axes.replicate > 1:
            model.set_requires_all_reduce(last or exact)
        yield

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """DTensors with the model's own names."""
        return self.model.named_parameters()

    def units(self) -> list[UnitParams]:
        """The units of ``fully_shard``; for a group of modules, the one that runs first."""
        owned = own_parameters(self._modules)
        return [
            (modules[0], params)
            for modules, params in zip(self._modules, owned, strict=True)
            if params
        ]

    def unit_names(self) -> list[list[str]]:
        """The groups of modules that ``fully_shard`` got, of all stages. A collective in a
        pipeline."""
        names = {module: name for name, module in self.model.named_modules()}
        unit_names = [
            [names[module] for module in modules] for modules in self._modules
        ]
        return unit_names if self.pipeline is None else self.pipeline.gather(unit_names)

    def gather_after(self, module: nn.Module, event: Any) -> None:
        """Make the stream that copies shards into the all-gather wait."""
        stream = gathering_stream(module)
        if stream is None:
            event.synchronize()
        else:
            stream.wait_event(event)

    def mirror_parameters(self) -> Callable[[list[nn.Parameter]], None] | None:
        """Keep a mirror where parameters are offloaded and the forward does not compute in
        float32."""
        if (
            not self.world.cpu_offload
            or self.config.param_dtype is DType.float32
            or self.world.deterministic.uses_float64
        ):
            return None
        modules = [module for module, _ in self.units()]
        pin_memory = self.world.device.pins_memory
        mirror = mirror_parameters(
            modules, self.units_ahead, self.config.param_dtype.torch, pin_memory
        )
        return mirror.refresh if mirror else None

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """The tensors of the shards."""
        self._reshard()
        return State(self.trainable_parameters, optimizer, self.spread)

    def gathered_parts(self, name: str) -> int:
        """Also of features."""
        split = self.features is not None and self.features.dims.get(name) is not None
        return self.mesh_axes.tp if split else super().gathered_parts(name)

    def spread(self, name: str, tensor: Tensor) -> Tensor:
        """Return a DTensor of the full parameter if features are split."""
        return (
            tensor
            if self.features is None
            else self.features.to_global_dtensor(name, tensor)
        )

    def local_norms(
        self, grads: list[Tensor], map_parts: MapParts = map
    ) -> list[Tensor]:
        """Count gradients that all ranks of tp have on the first of them."""
        if self.features is not None and self.features.exchange.rank > 0:
            replicated = (
                param.grad
                for param in self.features.in_every_part(self.named_parameters())
            )
            counted = {
                local_tensor(grad).data_ptr()
                for grad in replicated
                if grad is not None and local_tensor(grad).numel()
            }
            grads = [grad for grad in grads if grad.data_ptr() not in counted]
        return super().local_norms(grads, map_parts)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All-gather one parameter at a time."""
        self._reshard()
        own = self._full_parameters()
        yield from own if self.pipeline is None else self.pipeline.share_parameters(own)

    def _full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.named_parameters():
            on_mesh = self.spread(name, unwrapped(param)).to(self.mesh.device_type)
            assert is_dtensor(on_mesh)
            yield name, unrounded(name, full_tensor(on_mesh))

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, self.library.FSDPModule):
                module.reshard()  # a unit stays gathered after a forward that no backward follows

    def shard_group(self) -> dist.ProcessGroup:
        """The ranks along the shard axis."""
        return self.mesh.get_group(SHARD_AXIS)


@dataclass
class FSDP2Config(FSDPConfig):
    """Per-parameter sharding."""

    name: ClassVar[str] = "fsdp2"
    strategy = FSDP2
    capabilities = Capabilities(
        deterministic=True,
        shards_parameters=True,
        uses_dtensor=True,
        context_forms=FORMS,
        splits_experts=True,
        splits_features=True,
        splits_layers=True,
        cpu_offload=True,
        overlapped_cpu_offload=True,
        optimizer_offload=True,
        lazy_updates=True,
        optimizer_in_backward=True,
        float8=True,
        float8_all_gather=True,
        layout_mode=True,
        muon=True,
        low_bit_states=True,
        mixed_dtypes=MIXES_DTYPES,
    )

    schedule: PipelineSchedule = option(
        PipelineSchedule.gpipe, effect=Effect.rounding, needs="mesh.pp_size"
    )
    """Order of a step's micro-batches in a pipeline (``mesh.pp_size``)."""

    def validate(
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Refuse settings that the installed torch cannot do."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        replicated = mesh.shard_ranks(world_size) < mesh.stage_ranks(world_size)
        if device_type == "cpu" and replicated and TORCH < (2, 8):
            raise ConfigError(
                f"mesh.fsdp_size={mesh.fsdp_size} replicates, which FSDP2 can do on a CPU from "
                f"torch 2.8 on (found {torch.__version__}); set mesh.fsdp_size=-1 or "
                "parallel=fsdp1"
            )
