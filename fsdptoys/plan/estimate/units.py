"""Which parameters a strategy gathers and reduces at a time, as sizes."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from fsdptoys.models import DecoderModel
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.fsdp2 import placement

from .meta_trace import PARTS


@dataclass(eq=False)
class UnitBytes:
    """Parameters that are gathered together."""

    params: list[nn.Parameter] = field(default_factory=list)
    """Of the model on the meta device."""
    local: list[int] = field(default_factory=list)
    """Elements of each that a rank holds, padding included."""
    resharded: bool = True
    """Whether the gathered parameters are freed after the forward."""
    gathered_in_backward: bool = True

    @functools.cached_property
    def elements(self) -> int:
        """Of all parameters in full."""
        return sum(param.numel() for param in self.params)

    @functools.cached_property
    def local_elements(self) -> int:
        """That a rank holds."""
        return sum(self.local)

    def held(self) -> list[tuple[nn.Parameter, int]]:
        """Each parameter, and how many elements of it a rank holds."""
        return list(zip(self.params, self.local, strict=True))


@dataclass
class Units:
    """A model's, by where it needs them."""

    embedding: UnitBytes
    blocks: list[dict[str, UnitBytes]]
    """Of each block: its own under the empty name, and those of parts that are units."""
    head: UnitBytes
    """The same object as the embedding's, where one unit holds both."""
    root: UnitBytes
    """What is left: gathered all the time."""

    def in_forward(self) -> list[UnitBytes]:
        """Every unit once, in the order in which the forward needs them."""
        inner = [unit for block in self.blocks for unit in block.values()]
        every = dict.fromkeys([self.root, self.embedding, *inner, self.head])
        return [unit for unit in every if unit.params]

    def after_forward(self) -> list[UnitBytes]:
        """Every unit but a root of its own, in the order in which their forwards end."""
        inner = [unit for block in self.blocks for unit in [*list(block.values())[1:], block[""]]]
        first = [] if self.embedding is self.head else [self.embedding]
        return [unit for unit in [*first, *inner, self.head] if unit.params]


def make_units(model: DecoderModel, strategy: str, wrap: Wrap, ranks: int) -> Units:
    """Divide a model as a strategy does.

    Args:
        model: on the meta device.
        strategy: the word after ``parallel=``.
        wrap: which modules of a block are units.
        ranks: that share one copy; 1 where nothing is sharded.
    """
    tied = model.lm_head.weight is model.embed_tokens.weight
    parts = PARTS if wrap is Wrap.block_attn_mlp else ()
    blocks = []
    for block in model.layers:
        inner = {part: _unit(block.get_submodule(part).parameters(), strategy, ranks) for part in parts}
        taken = {param for unit in inner.values() for param in unit.params}
        own = _unit((param for param in block.parameters() if param not in taken), strategy, ranks)
        blocks.append({"": own, **inner})
    in_blocks = {param for unit in blocks for each in unit.values() for param in each.params}
    embedding, norm = list(model.embed_tokens.parameters()), list(model.norm.parameters())
    head = list(model.lm_head.parameters())
    left = [param for param in model.parameters() if param not in in_blocks]
    apart = [*embedding, *head] if strategy == "fsdp1" else [*embedding, *norm, *head]
    if tied and strategy == "fsdp1":
        apart = []
    root = _unit([param for param in left if all(param is not other for other in apart)], strategy, ranks)
    if tied and strategy == "fsdp1":
        return Units(root, blocks, root, root)
    if tied:
        both = _unit(dict.fromkeys([*embedding, *norm, *head]), strategy, ranks)
        return Units(both, blocks, both, root)
    return Units(
        _unit(embedding, strategy, ranks),
        blocks,
        _unit(head if strategy == "fsdp1" else [*norm, *head], strategy, ranks),
        root,
    )


def _unit(params: Iterable[nn.Parameter], strategy: str, ranks: int) -> UnitBytes:
    chosen = list(params)
    if strategy == "fsdp1":
        # Flattened first, so that only the unit's end is padded.
        total = sum(param.numel() for param in chosen)
        padding = -(-total // ranks) * ranks - total
        shares = [param.numel() / ranks for param in chosen]
        local = [round(share) for share in shares]
        if local:
            local[-1] += (total + padding) // ranks - sum(local)
        return UnitBytes(chosen, local)
    return UnitBytes(chosen, [_rows(param, ranks) for param in chosen])


def _rows(param: nn.Parameter, ranks: int) -> int:
    """Elements of a rank's part of a parameter that is sharded along one dim, and padded along the first."""
    chosen = placement(param, ranks)
    dim = chosen.dim if chosen is not None else 0
    size = param.shape[dim]
    return -(-size // ranks) * (math.prod(param.shape) // size)
