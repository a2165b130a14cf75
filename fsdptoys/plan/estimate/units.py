"""Inputs of a step model: the configuration, and its units of parameters that are gathered and reduced together."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.models import DecoderModel
from fsdptoys.parallel import FSDP2Config, FSDPConfig, ParallelConfig
from fsdptoys.parallel.expert_parallel import expert_dim, is_split
from fsdptoys.parallel.fsdp2 import placement
from fsdptoys.parallel.mesh import EXPERT_SHARD_AXIS, SHARD_AXIS, Axes
from fsdptoys.parallel.strategy import own_parameters
from fsdptoys.parallel.wrap import Unit, inside_out

from .unit_traces import HEAD, Segments
from .update_traces import Exchange, Shard, local_shape


@dataclass(eq=False)
class UnitBytes:
    """A unit's parameters and this rank's share of each."""

    params: list[nn.Parameter] = field(default_factory=list)
    local: list[int] = field(default_factory=list)  # Elements of each parameter on this rank, including padding
    resharded: bool = True  # Whether the gathered parameters are freed after the forward
    gathered_in_backward: bool = True
    ranks: int = 1  # Ranks that share the parameters
    axis: str = SHARD_AXIS
    stride: int = 1  # Distance of these ranks

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the full parameters."""
        return sum(param.numel() for param in self.params)

    @functools.cached_property
    def local_elements(self) -> int:
        """Elements on this rank."""
        return sum(self.local)

    def shards(self) -> list[tuple[nn.Parameter, int]]:
        """Each parameter and its elements on this rank."""
        return list(zip(self.params, self.local, strict=True))


@dataclass
class Units:
    """All units of a model; a part of the model is described by its units, by name within the part."""

    embedding: dict[str, UnitBytes]
    blocks: list[dict[str, UnitBytes]]  # A block's own unit has the empty name
    head: dict[str, UnitBytes]  # Norm and head; with the embedding's unit if one unit holds all
    root: UnitBytes  # Parameters of no other unit

    @property
    def local_elements(self) -> int:
        """Elements on this rank, which it updates."""
        return sum(unit.local_elements for unit in self.in_forward())

    def shards(self) -> list[tuple[UnitBytes, nn.Parameter, int]]:
        """Each unit, parameter and its elements on this rank, in the forward's order."""
        return [(unit, *shard) for unit in self.in_forward() for shard in unit.shards()]

    @property
    def tied(self) -> UnitBytes | None:
        """The unit of embedding and head, if it is not the root."""
        shared = set(self.embedding.values()) & set(self.head.values())
        return next(iter(shared), None)

    def in_forward(self) -> list[UnitBytes]:
        """Every unit once, in the order in which the forward needs them."""
        inner = [unit for block in self.blocks for unit in block.values()]
        every = dict.fromkeys([self.root, *self.embedding.values(), *inner, *self.head.values()])
        return [unit for unit in every if unit.params]

    def after_forward(self) -> list[UnitBytes]:
        """Every unit in the order in which their forwards end."""
        inner = [block[name] for block in self.blocks for name in inside_out(list(block))]
        first = [unit for unit in self.embedding.values() if unit is not self.tied]
        return [unit for unit in dict.fromkeys([*first, *inner, *self.head.values(), self.root]) if unit.params]


@dataclass(frozen=True)
class StepSetup:
    """A configuration with its model's traced segments and units."""

    config: Config
    world_size: int
    model: DecoderModel
    segments: Segments
    units: Units
    shard_ranks: int  # Ranks that share one copy of the parameters
    attention: AttentionKind
    axes: Axes
    workspace_bytes: int  # Of a thread's matmuls

    @functools.cached_property
    def in_blocks(self) -> set[nn.Parameter]:
        """Parameters of the blocks."""
        return set(self.model.layers.parameters())

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name → parameter."""
        return dict(self.model.named_parameters())

    @functools.cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """Parameter → name; a tied weight has that of the embedding."""
        return {param: name for name, param in self.parameters.items()}

    def full_name(self, segment: int, name: str) -> str:
        """Name of a parameter, from the number of its segment and the name within it."""
        return f"layers.{segment - 1}.{name}" if 0 < segment <= len(self.segments.blocks) else name

    @functools.cached_property
    def ties(self) -> bool:
        """Whether embedding and head share a weight."""
        return self.model.lm_head.weight is self.model.embed_tokens.weight

    def shards(self) -> list[list[Shard]]:
        """This rank's parts of the parameters of each unit that has any, for the optimizer."""
        merged = self.config.parallel.flattens_parameters and not self.config.parallel.keeps_parameters
        units = []
        for unit in self.units.in_forward():
            if merged:
                shape = (unit.local_elements,)
                units.append([Shard(self.names[unit.params[0]], shape, shape, 0, False)])
            else:
                units.append([self._shard(param, local) for param, local in unit.shards() if local])
        return units

    def _shard(self, param: nn.Parameter, local: int) -> Shard:
        ranks = self.axes.efsdp if self.axes.ep > 1 and param.ndim == 3 else self.shard_ranks
        dim = shard_dim(param, ranks, self.axes.ep > 1) if ranks > 1 else None
        if self.config.parallel.flattens_parameters:
            shape: tuple[int, ...] = (local,)
        else:
            shape = local_shape(param.shape, local, dim)
        return Shard(self.names[param], tuple(param.shape), shape, dim, param in self.in_blocks)

    @property
    def exchange(self) -> Exchange:
        """The ranks that share the update of a matrix."""
        if self.config.parallel.shards_parameters:
            return Exchange(self.shard_ranks, "shard" if self.replicas > 1 else "world")
        return Exchange(self.world_size, "world")

    @property
    def part(self) -> int:
        """Tokens of this rank's part of a sequence."""
        return self.config.train.seq_len // self.config.mesh.cp_size

    @property
    def compute_bytes(self) -> int:
        """Bytes of a parameter in forward and backward."""
        return self.config.parallel.param_dtype.torch.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient element during its reduction."""
        dtype = getattr(self.config.parallel, "reduce_dtype", None)
        return dtype.torch.itemsize if dtype is not None else 4

    @property
    def replicas(self) -> int:
        """Copies of the parameters."""
        return self.world_size // self.shard_ranks


def make_units(model: DecoderModel, parallel: ParallelConfig, ranks: int, axes: Axes) -> Units:
    """Divide a model into the units of its strategy.

    Args:
        model: on the meta device, with this rank's experts if they are split.
        parallel: a strategy without units is given those of whole blocks.
        ranks: number of shards.
        axes: sizes of the mesh axes.
    """
    sharded = parallel if isinstance(parallel, FSDPConfig) else None
    units = (sharded or FSDP2Config()).units(model, axes.ep > 1)
    settings = [(sharded is None or sharded.reshards(unit), unit) for unit in [*units, None]]
    flatten = parallel.flattens_parameters
    return _make_units(model, tuple(settings), flatten, ranks, axes)


@functools.lru_cache(maxsize=256)
def _make_units(
    model: DecoderModel, settings: tuple[tuple[bool, Unit | None], ...], flatten: bool, ranks: int, axes: Axes
) -> Units:
    modules = [[model.get_submodule(name) for name in (unit.modules if unit else [""])] for _, unit in settings]
    # Outer modules come first.
    of_root, *owned = own_parameters([modules[-1], *modules[:-1]])
    made = Units({}, [{} for _ in model.layers], {}, _unit(of_root, flatten, ranks))
    for (resharded, unit), params in zip(settings, owned, strict=False):
        assert unit is not None
        if is_split(model.get_submodule(unit.modules[0])):
            unit_bytes = _unit(params, flatten, axes.efsdp, split=True)
            unit_bytes.axis, unit_bytes.stride = EXPERT_SHARD_AXIS, axes.ep
        else:
            unit_bytes = _unit(params, flatten, ranks)
        unit_bytes.resharded = resharded
        unit_bytes.gathered_in_backward = flatten or not unit.embeds
        for name in unit.modules:
            first, _, rest = name.partition(".")
            if first == "layers":
                index, _, part = rest.partition(".")
                made.blocks[int(index)][part] = unit_bytes
            else:
                (made.head if first in HEAD else made.embedding)[name] = unit_bytes
    # FSDP1 frees its root after the forward only where it is a cast copy.
    made.root.resharded = ranks == 1 if flatten else settings[-1][0]
    return made


def _unit(params: Iterable[nn.Parameter], flatten: bool, ranks: int, split: bool = False) -> UnitBytes:
    chosen = list(params)
    if not flatten:
        return UnitBytes(chosen, [_shard_elements(param, ranks, split) for param in chosen], ranks=ranks)
    left, local = -(-sum(param.numel() for param in chosen) // ranks), []
    for param in chosen:  # the first rank has the beginning of the flat parameter
        local.append(min(left, param.numel()))
        left -= local[-1]
    return UnitBytes(chosen, local, ranks=ranks)


def _shard_elements(param: nn.Parameter, ranks: int, split: bool) -> int:
    """Elements of a rank's shard, sharded along one dim; dim 0 is padded."""
    size = param.shape[shard_dim(param, ranks, split)]
    return -(-size // ranks) * (math.prod(param.shape) // size)


def shard_dim(param: nn.Parameter, ranks: int, split: bool) -> int:
    """The dim along which FSDP2 shards a parameter; ``split`` if ranks split the stacks of experts."""
    if split and param.ndim == 3:
        return expert_dim(param.shape, ranks) or 0
    chosen = placement(param, ranks)
    return chosen.dim if chosen is not None else 0
