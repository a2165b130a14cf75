"""Blocks of transformers that can be recomputed and compiled like those of this project."""

import functools
from typing import Any

from torch import nn

from ..layers import RunnableBlock


def make_runnable(block: nn.Module) -> None:
    """Give a block the switches of ``RunnableBlock``: its class becomes a subclass of both.

    The subclass has the block's name, since classes are chosen by name (``wrap_classes``).
    """
    if not isinstance(block, RunnableBlock):
        kind: Any = type(block)
        block.__class__ = _runnable(kind)


@functools.cache
def _runnable(kind: Any) -> type[nn.Module]:
    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        return kind.forward(self, *args, **kwargs)

    return type(
        kind.__name__,
        (RunnableBlock, kind),
        {"compute": compute, "__module__": kind.__module__},
    )
