"""Blocks compiled one by one, with PyTorch's partitioner to decide what they save for the backward.

Compiling blocks rather than the model takes one compilation for all blocks alike, and leaves the hooks of a strategy,
which gather and reduce, outside. The partitioner keeps what saves time by being kept. With a budget below 1 it computes
more again, what takes the fewest FLOPs first, until the rest fits into that share of what it would have kept
(https://pytorch.org/blog/activation-checkpointing-techniques/): a finer choice than gradient checkpointing's.

Gradient checkpointing is compiled along, so that the backward computes only what it needs again. Where a block cannot
be compiled whole (experts; parts with hooks of their own), or what it saves is offloaded, checkpointing stays outside
of what is compiled, and the whole forward is made again, a block's last product too.

Not covered: embedding, norm and head, which stay as they are; ``selective`` where checkpointing must stay outside; two
budgets in one process, since what was compiled under the first serves the second too.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.memory.activation_offload import ActivationOffload
from fsdptoys.models import routers


class CompiledForward:
    """A block's compiled forward, found as ``block.compiled_forward``.

    Args:
        function: what is called.

    Attributes:
        around: makes what surrounds each call, also where checkpointing calls again in the backward. What is done there
            is not compiled, and so breaks no graph.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        with self.around():
            return self.function(*args)


def compile_blocks(
    blocks: Sequence[nn.Module] | nn.ModuleList,
    budget: float | None = None,
    *,
    inner_hooks: bool = False,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile each block's forward at its first call; after ``checkpoint_blocks``, before anything wraps the blocks.

    Args:
        blocks: of one model.
        budget: share of the activations that the partitioner may keep, 0 to 1; None leaves it alone.
        inner_hooks: whether a strategy will put hooks on parts of a block.
        backend: of ``torch.compile``.

    Raises:
        ConfigError: if ``selective`` could not see into what is compiled.
    """
    for block in blocks:
        # Routers are told gradients between forward and backward. Compiled with a low budget, they took what was there
        # in the forward (torch 2.13).
        for router in routers(block):
            router.forward = torch.compiler.disable(router.forward)  # type: ignore[method-assign]
        forward: Any = block.forward
        outside = None
        if isinstance(forward, functools.partial) and (inner_hooks or routers(block) or _offloads(forward)):
            if forward.keywords.get("context_fn") or forward.keywords.get("operators"):
                raise ConfigError(
                    "memory.gradient_checkpointing=selective cannot see into what train.compile=true compiles where "
                    "there are experts, parallel.wrap=block_attn_mlp or memory.activation_offload=true; set "
                    "memory.gradient_checkpointing=full"
                )
            outside, forward = forward, forward.args[0]
        forward = torch.compile(forward, backend=backend)
        if budget is not None:
            forward = functools.partial(_call_within, budget, forward)
        forward = block.compiled_forward = CompiledForward(forward)  # type: ignore[assignment]
        block.forward = functools.partial(outside.func, forward, **outside.keywords) if outside else forward


def _offloads(forward: "functools.partial[Any]") -> bool:
    return isinstance(getattr(forward.func, "__self__", None), ActivationOffload)


def _call_within(budget: float, forward: Callable[..., Any], *args: Any) -> Any:
    # Around every call, since any may compile anew: for another shape, with gradients or without.
    with _memory_budget(budget):
        return forward(*args)


def _memory_budget(budget: float) -> AbstractContextManager[Any]:
    """What is compiled in here keeps that share of the activations (a private setting; tried on torch 2.7 and 2.13)."""
    patch: AbstractContextManager[Any] = torch._functorch.config.patch(activation_memory_budget=budget)
    return patch
