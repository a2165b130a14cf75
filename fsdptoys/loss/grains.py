"""The training loss grain by grain, so that neither it nor its gradients depend on the layout
(``exact.ops``).

The plain loss keeps the logits of all tokens, once, in the compute dtype. The chunked loss keeps
none: the backward makes them again, which is a fourth matmul. Both take several grains at a time;
the rows of a softmax are padded until a vectorized loop leaves none to its tail.

Shapes: N tokens, C tokens of a chunk, R rows of a softmax, D width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.exact.attention import on_grid, split_rows
from fsdptoys.exact.products import LANES, add_weight_gradient, blocks_of, multiply

from .objective import IGNORE_INDEX, Objective
from .softmax import block_gradient_

CHUNK_ELEMENTS = 2**19
"""Logits made at a time."""
SOFTMAX_ELEMENTS = 2**18
"""Logits of a softmax, as many as fit in a core's own cache."""
LOSSES = 1.5 * 2.0**22
"""Losses of tokens become multiples of 2⁻³⁰ (``on_grid``); sums below 2²³ are exact."""


def grain_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective,
    grain: int,
    *,
    keeps_logits: bool,
) -> Tensor:
    """The loss summed over valid labels, a float64 scalar.

    Args:
        hidden_ND: in the compute dtype.
        weight_VD: float64.
        labels_N: classes, or ``IGNORE_INDEX``.
        objective: function of the logits to minimize.
        grain: tokens of a grain.
        keeps_logits: keep logits for the backward rather than make them again.
    """
    return _GrainLoss.apply(
        hidden_ND, weight_VD, labels_N, objective, grain, keeps_logits
    )


class _GrainLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        objective: Objective,
        grain: int,
        keeps_logits: bool,
    ) -> Tensor:
        cast_VD = weight_VD.to(hidden_ND.dtype)
        keeps = keeps_logits and any(ctx.needs_input_grad)
        logits_NV = (
            hidden_ND.new_empty(len(hidden_ND), len(weight_VD)) if keeps else None
        )
        losses_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        for rows in chunk_tokens(hidden_ND, len(weight_VD), grain):
            logits_CV = multiply(hidden_ND[rows], cast_VD, None, grain)
            if logits_NV is not None:
                logits_NV[rows] = logits_CV
            losses_N[rows] = _softmax_(
                logits_CV.float(), labels_N[rows], objective, gradient=False
            )
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, logits_NV)
        ctx.settings = objective, grain
        return on_grid(losses_N, LOSSES).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, logits_NV = ctx.saved_tensors
        objective, grain = ctx.settings
        cast_VD = weight_VD.to(hidden_ND.dtype)
        grad_hidden_ND = torch.empty_like(
            hidden_ND, memory_format=torch.contiguous_format
        )
        grad_weight_VD = torch.zeros_like(
            weight_VD, memory_format=torch.contiguous_format
        )
        grad_NV = None if logits_NV is None else torch.empty_like(logits_NV)
        for rows in chunk_tokens(hidden_ND, len(weight_VD), grain):
            logits_CV = (
                multiply(hidden_ND[rows], cast_VD, None, grain)
                if logits_NV is None
                else logits_NV[rows]
            )
            values_CV = logits_CV.to(torch.float32, copy=logits_NV is not None)
            _softmax_(values_CV, labels_N[rows], objective, gradient=True)
            grad_CV = values_CV.mul_(upstream.to(torch.float32)).to(hidden_ND.dtype)
            grad_hidden_ND[rows] = multiply(grad_CV, cast_VD.t(), None, grain)
            if grad_NV is None:
                add_weight_gradient(grad_weight_VD, grad_CV, hidden_ND[rows], grain)
            else:
                grad_NV[rows] = grad_CV
        # All grains at once: each block of the sum is read and written once
        if grad_NV is not None:
            add_weight_gradient(grad_weight_VD, grad_NV, hidden_ND, grain)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def chunk_tokens(hidden_ND: Tensor, classes: int, grain: int) -> Iterator[slice]:
    """Rows whose logits are made at a time: whole grains, or one where reductions need its
    shape."""
    grains = (
        CHUNK_ELEMENTS // (grain * classes)
        if blocks_of(hidden_ND).joins_reductions
        else 1
    )
    return split_rows(len(hidden_ND), grain * max(1, grains))


def _softmax_(
    values_CV: Tensor, labels_C: Tensor, objective: Objective, *, gradient: bool
) -> Tensor:
    """Losses of float32 logits, which become their gradients; without ``gradient`` they end up
    undefined."""
    losses = []
    joined = SOFTMAX_ELEMENTS // (LANES * values_CV.shape[1])
    if not blocks_of(values_CV).joins_reductions:  # the rows are those of one grain
        joined = -(-len(values_CV) // LANES)
    for rows in split_rows(len(values_CV), LANES * max(1, joined)):
        block_RV = values_CV[rows]
        labels_R = labels_C[rows]
        missing = -len(block_RV) % LANES
        if not missing:
            losses.append(
                block_gradient_(
                    block_RV, labels_R[:, None], objective, gradient, some_ignored=True
                )
            )
            continue
        padded_RV, labels_R = (
            F.pad(block_RV, (0, 0, 0, missing)),
            F.pad(labels_R, (0, missing), value=IGNORE_INDEX),
        )
        found_R = block_gradient_(
            padded_RV, labels_R[:, None], objective, gradient, some_ignored=True
        )
        losses.append(found_R[: len(block_RV)])
        if gradient:
            block_RV.copy_(padded_RV[: len(block_RV)])
    return torch.cat(losses)
