"""Inputs of a step model: the configuration, and its units of parameters that are gathered and reduced together."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.models import DecoderModel
from fsdptoys.parallel.fsdp2 import placement

from .activations import PARTS, Segments


@dataclass(eq=False)
class UnitBytes:
    """A unit's parameters and this rank's share of each."""

    params: list[nn.Parameter] = field(default_factory=list)
    local: list[int] = field(default_factory=list)  # Elements of each parameter on this rank, including padding
    resharded: bool = True  # Whether the gathered parameters are freed after the forward
    gathered_in_backward: bool = True

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
    """All units of a model."""

    embedding: UnitBytes
    blocks: list[dict[str, UnitBytes]]  # For each block: its own unit under the empty name, and the units of its parts
    head: UnitBytes  # The embedding's unit if one unit holds both
    root: UnitBytes  # Parameters of no other unit; they stay gathered

    @property
    def local_elements(self) -> int:
        """Elements on this rank, which it updates."""
        return sum(unit.local_elements for unit in self.in_forward())

    def shards(self) -> list[tuple[UnitBytes, nn.Parameter, int]]:
        """Each unit, parameter and its elements on this rank, in the forward's order."""
        return [(unit, *shard) for unit in self.in_forward() for shard in unit.shards()]

    @property
    def in_blocks(self) -> set[UnitBytes]:
        """Units of the blocks and their parts."""
        return {unit for block in self.blocks for unit in block.values()}

    def in_forward(self) -> list[UnitBytes]:
        """Every unit once, in the order in which the forward needs them."""
        inner = [unit for block in self.blocks for unit in block.values()]
        every = dict.fromkeys([self.root, self.embedding, *inner, self.head])
        return [unit for unit in every if unit.params]

    def after_forward(self) -> list[UnitBytes]:
        """Every unit except a separate root, in the order in which their forwards end."""
        inner = [unit for block in self.blocks for unit in [*list(block.values())[1:], block[""]]]
        first = [] if self.embedding is self.head else [self.embedding]
        return [unit for unit in [*first, *inner, self.head] if unit.params]


@dataclass(frozen=True)
class StepSetup:
    """A configuration with its model's measured segments and units."""

    config: Config
    world_size: int
    model: DecoderModel
    segments: Segments
    units: Units
    shard_ranks: int  # Ranks that share one copy of the parameters

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


@functools.lru_cache(maxsize=256)
def make_units(model: DecoderModel, *, flatten: bool, split_blocks: bool, ranks: int) -> Units:
    """Divide a model into units.

    Args:
        model: on the meta device.
        flatten: whether a unit is one module with a flat parameter, as in FSDP1; otherwise norm and head share a unit.
        split_blocks: whether attention and feed-forward are units of their own.
        ranks: number of shards.
    """
    make = functools.partial(_unit, flatten=flatten, ranks=ranks)
    tied = model.lm_head.weight is model.embed_tokens.weight
    blocks = []
    for block in model.layers:
        inner = {part: make(block.get_submodule(part).parameters()) for part in (PARTS if split_blocks else ())}
        taken = {param for unit in inner.values() for param in unit.params}
        blocks.append({"": make(param for param in block.parameters() if param not in taken), **inner})
    in_blocks = {param for unit in blocks for each in unit.values() for param in each.params}
    embedding, head = list(model.embed_tokens.parameters()), list(model.lm_head.parameters())
    if not flatten:
        head = [*model.norm.parameters(), *head]
    separate = [] if tied and flatten else [*embedding, *head]
    left = [param for param in model.parameters() if param not in in_blocks]
    root = make(param for param in left if all(param is not other for other in separate))
    if tied:
        both = root if flatten else make(dict.fromkeys([*embedding, *head]))
        return Units(both, blocks, both, root)
    return Units(make(embedding), blocks, make(head), root)


def _unit(params: Iterable[nn.Parameter], flatten: bool, ranks: int) -> UnitBytes:
    chosen = list(params)
    if not flatten:
        return UnitBytes(chosen, [_shard_elements(param, ranks) for param in chosen])
    # Only the end of the flat parameter is padded.
    local = [round(param.numel() / ranks) for param in chosen]
    if local:
        local[-1] += -(-sum(param.numel() for param in chosen) // ranks) - sum(local)
    return UnitBytes(chosen, local)


def _shard_elements(param: nn.Parameter, ranks: int) -> int:
    """Elements of a rank's shard, sharded along one dim; dim 0 is padded."""
    chosen = placement(param, ranks)
    dim = chosen.dim if chosen is not None else 0
    size = param.shape[dim]
    return -(-size // ranks) * (math.prod(param.shape) // size)
