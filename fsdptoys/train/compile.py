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
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.memory.activation_checkpointing import Recomputation
from fsdptoys.models import routers
from fsdptoys.models.layers import RunnableBlock


class CompiledBlock:
    """A compiled function, or another that runs in contexts, as a block's ``execute``.

    Attributes:
        contexts: make the contexts of each call, including recomputation in the backward. They are
            not compiled, so they cause no graph breaks.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.contexts: list[Callable[[], AbstractContextManager[Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function within new contexts."""
        with ExitStack() as stack:
            for make_context in self.contexts:
                stack.enter_context(make_context())
            return self.function(*args, **kwargs)


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
        compiled = CompiledBlock(torch.compile(function, backend=backend))
        if budget is not None:
            # Around every call, since any call may recompile, for example for another shape or
            # gradient mode. A private setting of torch, tested with 2.7 and 2.13.
            patch = torch._functorch.config.patch
            compiled.contexts.append(
                functools.partial(patch, activation_memory_budget=budget)
            )
        block.execute = compiled
