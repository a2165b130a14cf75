"""A stage of a model: consecutive blocks, the first with the embedding, the last with the final
norm and the head.

A model that keeps some stages (``stage_split``) has only their parameters, under the names of the
full model. Its forward runs one stage at a time: token ids or hidden states in, hidden states,
logits or the loss out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .layers import Block

LAST = ("norm", "lm_head")
"""Modules after the last block."""


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks of a model."""

    first: int
    """Index of its first block."""
    end: int
    """Index after its last block."""
    embeds: bool
    """Whether it is the first stage, which takes token ids."""
    predicts: bool
    """Whether it is the last stage, which returns logits or the loss."""

    @property
    def size(self) -> int:
        """Number of its blocks."""
        return self.end - self.first

    def has(self, name: str) -> bool:
        """Whether it has a module or a parameter, by its name in the full model."""
        parts = name.split(".")
        if parts[0] == "layers":
            return self.first <= int(parts[1]) < self.end
        return self.predicts if parts[0] in LAST else self.embeds

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """Its modules among those that a ``DecoderModel`` has."""
        others = [
            module
            for name, module in model.named_children()
            if name != "layers" and self.has(name)
        ]
        return [*others, *self.blocks(model.get_submodule("layers"))]

    def blocks(self, layers: nn.Module) -> Iterator[Block]:
        """Its blocks among those that a model has."""
        for index in range(self.first, self.end):
            block = layers.get_submodule(str(index))
            assert isinstance(block, Block)
            yield block
