"""Gradient checkpointing: blocks drop their activations in the forward and recompute them in the
backward.

Memory for activations falls from every block's to one block's plus each block's input; the forward
of checkpointed blocks runs twice (arXiv:1604.06174). Two settings are in between: ``every=k``
leaves the other blocks alone, and ``selective`` keeps the results of the most expensive operators
and recomputes the cheap rest (arXiv:2205.05198).

PyTorch's non-reentrant ``checkpoint`` does the work. It restores the random state, and stops the
recomputation early, so that the last matmul of a block does not run again. ``selective`` keeps that
matmul's result anyway, though no backward needs it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdptoys.models.layers import RunnableBlock

from .activation_offload import ActivationOffload


class GradientCheckpointing(Enum):
    """Extent of the recomputation."""

    none = "none"
    full = "full"
    """Whole blocks."""
    selective = "selective"
    """All but the results of some operators."""


def _operators(*names: str) -> tuple[torch._ops.OpOverload, ...]:
    """The named operators that this torch and its loaded extensions have."""
    packets = (
        getattr(getattr(torch.ops, library), name, None)
        for library, name in (n.split(".") for n in names)
    )
    return tuple(packet.default for packet in packets if packet is not None)


SAVED_OPERATORS = {
    # Also the first of an expert's two matmuls where experts are multiplied one by one; the second
    # writes in place, which cannot be replayed.
    "mm": _operators(
        "aten.mm", "aten.addmm", "aten._scaled_mm", "aten.linear", "aten.mkldnn_linear"
    ),
    "bmm": _operators("aten.bmm", "aten.baddbmm"),
    "attention": _operators(
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "npu.npu_fusion_attention",
        "npu.npu_fusion_attention_v2",
        "npu.npu_fusion_attention_v3",
    ),
    # The last multiplies experts in float32 on a CPU; otherwise only compiled code calls it.
    "grouped_mm": _operators(
        "aten._grouped_mm", "npu.npu_grouped_matmul", "mkldnn._linear_pointwise"
    ),
}
"""Name in ``memory.checkpointing_save`` → operators."""


@dataclass(frozen=True)
class Recomputation:
    """Calls a function; the backward recomputes its activations."""

    operators: Sequence[torch._ops.OpOverload] = ()
    """Their results are kept. A list, since torch.compile traces it (torch 2.7 cannot trace a
    set)."""
    offload: ActivationOffload | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``ActivationOffload.checkpoint``."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if kwargs:
            function = functools.partial(function, **kwargs)
        if self.offload is not None:
            return self.offload.checkpoint(
                function, *args, operators=self.operators, **self.options
            )
        if not self.operators:
            return checkpoint(function, *args, use_reentrant=False)
        contexts = functools.partial(
            create_selective_checkpoint_contexts, self.operators
        )
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def checkpoint_blocks(
    blocks: Iterable[nn.Module],
    mode: GradientCheckpointing,
    *,
    start_index: int = 0,
    every: int = 1,
    save: Sequence[str] = tuple(SAVED_OPERATORS),
    offload: ActivationOffload | None = None,
) -> None:
    """Recompute blocks in the backward.

    A strategy's hooks on a block run outside the recomputation, so that it gathers nothing by
    itself. ``selective`` keeps the results of those ``SAVED_OPERATORS`` that ``save`` names.
    """
    if mode is GradientCheckpointing.none:
        return
    chosen = list(blocks)[start_index::every]
    selective = mode is GradientCheckpointing.selective
    operators = (
        [operator for name in save for operator in SAVED_OPERATORS[name]]
        if selective
        else []
    )
    for index, block in enumerate(chosen):
        assert isinstance(block, RunnableBlock), (
            "another module would keep its activations"
        )
        options = (
            {"index": index, "is_last": index == len(chosen) - 1}
            if offload is not None
            else {}
        )
        block.recompute = Recomputation(operators, offload, options)
