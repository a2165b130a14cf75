"""Compile each block with ``torch.compile``, and let its partitioner choose the activations saved
for the backward.

Identical blocks share one compilation, and the strategy's hooks, which gather and reduce, stay
outside the graphs. The partitioner saves the activations that are slow to recompute. With a budget
below 1 it recomputes more, those with the fewest FLOPs first, until the rest fits into that share:
a finer choice than activation checkpointing of full blocks.

Activation checkpointing is compiled with the block, so the backward recomputes only the values it
needs. If a block cannot be compiled as one graph (experts, hooks on submodules) or its activations
are offloaded, checkpointing wraps the compiled function instead, and the backward repeats the full
forward, including the last matmul.

Limits: embedding, final norm and head are not compiled; ``selective`` needs checkpointing inside
the graph; one budget per process, since code compiled under the first budget is reused for the
second.

Source: https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.memory.activation_checkpointing import Recomputation
from fsdptoys.models import routers
from fsdptoys.models.layers import RunnableBlock


class CompiledBlock:
    """A compiled function, as a block's ``execute``.

    Attributes:
        around: returns a context for each call, including recomputation in the backward. It is not
            compiled, so it causes no graph breaks.
    """

    def __init__(self, function: Callable[..., Any], budget: float | None) -> None:
        self.function = function
        self._budget = budget
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, *args: Any) -> Any:
        """Call the function within ``around``."""
        with self.around(), self._within_budget():
            return self.function(*args)

    def _within_budget(self) -> AbstractContextManager[Any]:
        # Around every call, since any call may recompile, for example for another shape or gradient
        # mode. A private setting of torch, tested with 2.7 and 2.13.
        if self._budget is None:
            return nullcontext()
        return torch._functorch.config.patch(activation_memory_budget=self._budget)


def compile_blocks(
    blocks: Iterable[nn.Module],
    budget: float | None = None,
    *,
    inner_hooks: bool = False,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile each block at its first call; run after ``checkpoint_blocks``, before anything wraps
    blocks.

    ConfigError if ``selective`` checkpointing would have to wrap compiled functions.

    Args:
        budget: share of the activations that the partitioner may keep, 0 to 1; None for its
            default.
        inner_hooks: whether the strategy will register hooks on submodules of a block.
    """
    for block in blocks:
        assert isinstance(block, RunnableBlock), "another module would not be compiled"
        recompute = block.recompute
        function: Callable[..., Any] = block.compute
        if isinstance(recompute, Recomputation):
            if not inner_hooks and not routers(block) and recompute.offload is None:
                function = functools.partial(recompute, function)
                block.recompute = None
            elif recompute.operators:
                raise ConfigError(
                    "memory.gradient_checkpointing=selective cannot see into blocks compiled by "
                    "train.compile=true with experts, units within a block or "
                    "memory.activation_offload=true; set memory.gradient_checkpointing=full"
                )
        block.execute = CompiledBlock(torch.compile(function, backend=backend), budget)
