"""FSDP1: PyTorch's FullyShardedDataParallel, which flattens the parameters of a unit and shards the
flat tensor.

A mesh of two axes makes it hybrid. Embedding and head are units by default, unless they share a
weight: the root then holds both. Construction holds one unit in full at a time, since a unit is
flattened before it is sharded. With bf16 parameters, micro-batches are added up in bf16 before the
reduction. FSDP2 and DDP add them in float32.

Source: https://docs.pytorch.org/docs/stable/fsdp.html, arXiv:2304.11277.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.utils.options import Effect, option

from .capabilities import FORMS, Capabilities
from .fsdp import FSDPConfig, ReshardAfterForward
from .init_weights import ParamInit, init_buffers, shared_parameters
from .mesh import SHARD_AXIS, MeshConfig
from .state import State, settle, state_tensors
from .strategy import Strategy, UnitParams, World, own_parameters
from .wrap import inside_out

if TYPE_CHECKING:  # the command line composes configs without loading FSDP
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class FSDP1(Strategy):
    """PyTorch's FullyShardedDataParallel."""

    config: "FSDP1Config"
    model: "FullyShardedDataParallel"

    def __init__(self, config: "FSDP1Config", world: World) -> None:
        super().__init__(config, world)
        self.mesh = self.build_mesh()

    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Wrap from the inside out: materialize, initialize, flatten and shard one unit after the
        other."""
        names = {param: name for name, param in model.named_parameters()}
        materialized: dict[nn.Parameter, nn.Parameter] = {}
        device = self.world.device.torch_device

        def materialize_own_parameters(module: nn.Module) -> None:
            for attribute, param in list(module.named_parameters(recurse=False)):
                if param not in materialized:
                    materialized[param] = nn.Parameter(
                        torch.empty_like(param, device=device), param.requires_grad
                    )
                    param_init(materialized[param], names[param])
                setattr(module, attribute, materialized[param])

        shared = bool(shared_parameters(model))
        # On one rank FSDP1 assigns the unreduced gradient of a shared weight, which may be bf16, to
        # each of its float32 names, which torch refuses (seen with 2.13). Reducing costs one rank
        # nothing.
        self._reduces_always = shared and self.world.world_size == 1
        config = self.config
        init_buffers(model, device, config.buffer_dtype.torch, config.param_dtype.torch)
        options = self._options(
            config.buffer_dtype.torch
            if model.config.capabilities.buffer_dtype
            else None
        ) | {"param_init_fn": materialize_own_parameters}
        units = {unit.modules[0]: unit for unit in self.config.units(model)}
        # Embedding and head come first, while memory is empty: they are the largest.
        for name in sorted(
            inside_out(list(units)),
            key=lambda name: name.startswith(f"{model.blocks_name}."),
        ):
            owner, _, attribute = name.rpartition(".")
            sharding: dict[str, Any] = {
                "sharding_strategy": self._sharding_strategy(
                    self.config.reshards(units[name])
                )
            }
            parent = model.get_submodule(owner)
            if units[name].float32:
                sharding["mixed_precision"] = dataclasses.replace(
                    options["mixed_precision"], param_dtype=None
                )
            setattr(
                parent, attribute, _wrap(getattr(parent, attribute), options | sharding)
            )
            materialized.clear()
        self.model = _wrap(model, options)
        if self.world.deterministic.uses_float64:
            for unit in self._units:
                _sum_gradients(unit)
            self.gradient_divisor = 1

    def _sharding_strategy(self, reshards: bool) -> "ShardingStrategy":
        from torch.distributed.fsdp import ShardingStrategy

        if self.mesh.ndim == 1:
            return (
                ShardingStrategy.FULL_SHARD
                if reshards
                else ShardingStrategy.SHARD_GRAD_OP
            )
        return (
            ShardingStrategy.HYBRID_SHARD
            if reshards
            else ShardingStrategy._HYBRID_SHARD_ZERO2
        )

    def _options(self, buffer_dtype: torch.dtype | None) -> dict[str, Any]:
        from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision

        config = self.config
        world = self.world
        param_dtype = (
            torch.float64
            if world.deterministic.uses_float64
            else config.param_dtype.torch
        )
        return {
            "device_mesh": self.mesh,
            "device_id": world.device.torch_device,
            # The root's: FSDP1 never frees it after the forward.
            "sharding_strategy": self._sharding_strategy(
                config.reshard_after_forward is not ReshardAfterForward.never
            ),
            "mixed_precision": MixedPrecision(
                param_dtype=None if param_dtype is torch.float32 else param_dtype,
                reduce_dtype=config.reduce_dtype.torch,
                buffer_dtype=buffer_dtype,
                # The models keep rotary angles in float32 themselves; casting inputs would round
                # them.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "cpu_offload": CPUOffload(offload_params=world.cpu_offload),
            "forward_prefetch": config.forward_prefetch > 0,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE
            if config.backward_prefetch
            else None,
            "use_orig_params": config.use_orig_params,
        }

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce-scatter once a step, with the last micro-batch; in the deterministic mode, or as
        set, after each."""
        reduces = (
            index == count - 1
            or self.world.deterministic.reduces_each_microbatch
            or self.config.reduce_each_microbatch
            or self._reduces_always
        )
        with nullcontext() if reduces else self.model.no_sync():
            yield

    @functools.cached_property
    def _units(self) -> "list[FullyShardedDataParallel]":
        return self.model.fsdp_modules(self.model)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the flat gradients too; gradients of the model's parameters are views of them."""
        # A flat parameter keeps its offloaded gradient when those of its views are None.
        optimizer.zero_grad(set_to_none=not self.world.cpu_offload)
        for unit in self._units:
            _free_flat_gradient(unit)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's part of each parameter, flattened, or of each unit's flat parameter."""
        for name, param in self.model.named_parameters():
            yield _own_name(name), param

    def units(self) -> list[UnitParams]:
        """FSDP1's own units, the root first."""
        modules = self._units
        owned = own_parameters([[module] for module in modules])
        return [
            (module, params)
            for module, params in zip(modules, owned, strict=True)
            if params
        ]

    def unit_names(self) -> list[list[str]]:
        """FSDP1's own units."""
        return [[name] for name in self._names_of_units().values()]

    def _names_of_units(self) -> dict[nn.Module, str]:
        units = set(self._units)
        return {
            module: _own_name(f"{name}.").rstrip(".")
            for name, module in self.model.named_modules()
            if module in units
        }

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All-gather one unit at a time."""
        names = self._names_of_units()
        units = self._units
        # The root comes first: a child summoned before its root would become a root itself.
        for unit in units:
            prefix = f"{names[unit]}." if names[unit] else ""
            nested = tuple(
                f"{names[other]}."
                for other in units
                if other is not unit and names[other].startswith(prefix)
            )
            with self.model.summon_full_params(unit, recurse=False, writeback=False):
                for name, param in unit.named_parameters():
                    full_name = prefix + _own_name(name)
                    if not full_name.startswith(nested) and not name.endswith(
                        "_flat_param"
                    ):
                        yield (
                            full_name,
                            param.detach().to("cpu", torch.float32, copy=True),
                        )

    def shard_group(self) -> dist.ProcessGroup:
        """The ranks along the shard axis."""
        return self.mesh.get_group(SHARD_AXIS)

    def gradient_bytes(self, trained: list[Tensor], frozen: list[Tensor]) -> int:
        """A flat parameter has a gradient for its frozen elements too."""
        return super().gradient_bytes(trained, [])

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Parameters and states, resharded along the first dim."""
        return FlatState(self.model, optimizer)


@dataclass
class FSDP1Config(FSDPConfig):
    """Flat-parameter sharding."""

    name: ClassVar[str] = "fsdp1"
    strategy = FSDP1
    capabilities = Capabilities(
        deterministic=True,
        shards_parameters=True,
        flattens_parameters=True,
        context_forms=FORMS,
        cpu_offload=True,
        optimizer_offload=True,
        layout_mode=True,
    )  # no lazy_updates: its streams wait for updates once a forward, in the root

    use_orig_params: bool = option(True, effect=Effect.none)
    """Show the optimizer the model's own parameters rather than one flat parameter a unit."""

    def validate(
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Refuse settings that FSDP1 cannot do, or does silently wrong."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        if world_size > 1 and mesh.shard_ranks(world_size) == 1:
            raise ConfigError(
                "mesh.fsdp_size=1 makes FSDP1 keep full parameters and skip the all-reduce over "
                "replicas; set parallel=ddp, or parallel=fsdp2 to keep the mesh"
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"parallel.{name}={getattr(self, name)} is deeper than FSDP1 can prefetch; "
                    f"set parallel.{name}=1 or parallel=fsdp2"
                )
        if cpu_offload and device_type == "cpu":
            raise ConfigError(
                "memory.cpu_offload=true needs an accelerator to offload from under "
                "parallel=fsdp1; set parallel=fsdp2 or memory.cpu_offload=false"
            )


class FlatState(State):
    """Copies in host memory, resharded along the first dim by FSDP1's public state-dict functions.
    A collective."""

    def __init__(
        self, model: "FullyShardedDataParallel", optimizer: torch.optim.Optimizer
    ) -> None:
        settle(optimizer)
        self._model = model
        self.optimizer = optimizer
        with _sharded_form(model):
            self._weights: dict[str, Tensor] = model.state_dict()
            # torch.distributed.checkpoint's would let an optimizer without states take a step.
            self._optim: dict[str, Any] = model.optim_state_dict(model, optimizer)
        # model.state_dict() has a shared weight under each of its names; here it has the first.
        self._names = [
            name for group in self._optim["param_groups"] for name in group["params"]
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, to read or to fill in place."""
        tensors = {f"model.{name}": self._weights[name] for name in self._names}
        for name, state in self._optim["state"].items():
            tensors |= state_tensors(name, state)
        return tensors

    def install(self, tensors: dict[str, Tensor]) -> None:
        """Scatter the filled tensors. A collective."""
        model = self._model
        if self._weights.keys() > set(self._names):
            with model.summon_full_params(model, recurse=False, writeback=False):
                shared = shared_parameters(model)
            for alias, name in shared.items():
                self._weights[_own_name(alias)] = self._weights[_own_name(name)]
        with _sharded_form(model):
            model.load_state_dict(self._weights)
            states = model.optim_state_dict_to_load(model, self.optimizer, self._optim)
        self.optimizer.load_state_dict(states)


@contextmanager
def _sharded_form(model: "FullyShardedDataParallel") -> Iterator[None]:
    from torch.distributed.fsdp import (
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    configs = (
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    with warnings.catch_warnings():
        # FSDP1 warns that these functions are deprecated, and about sharding on one rank.
        warnings.simplefilter("ignore")
        with model.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
            yield


def _wrap(module: nn.Module, options: dict[str, object]) -> "FullyShardedDataParallel":
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        # On one rank FSDP1 warns at every unit that it does not shard.
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        return FullyShardedDataParallel(module, **options)  # type: ignore[arg-type]


def _sum_gradients(unit: "FullyShardedDataParallel") -> None:
    """Make a unit sum gradients over ranks: only powers of two divide without rounding.

    Private attributes, seen in torch 2.7 to 2.15.
    """
    names = "_gradient_predivide_factor", "_gradient_postdivide_factor"
    if not all(isinstance(getattr(unit, name, None), float | int) for name in names):
        raise ConfigError(
            f"train.deterministic=layout cannot make FSDP1 of torch {torch.__version__} sum "
            "gradients instead of averaging them; set parallel=fsdp2"
        )
    for name in names:
        setattr(unit, name, 1.0)


def _free_flat_gradient(unit: "FullyShardedDataParallel") -> None:
    """Set a unit's flat gradient to None if all its views are, as FSDP1's next forward would.

    Private API of torch 2.7.1 and 2.13; where it is missing, the flat gradients live until the next
    forward.
    """
    handle = getattr(unit, "_handle", None)
    free = getattr(handle, "_reset_flat_param_grad_info_if_needed", None)
    if free is not None:
        free()


def _own_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
