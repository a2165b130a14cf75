"""The training loss grain by grain, so that neither it nor its gradients depend on the layout (``models.grains``).

The plain loss keeps the logits of all tokens, once, in the compute dtype. The chunked loss keeps none: the backward
makes them again, which is a fourth matmul, and adds a weight gradient of the vocabulary's size for each grain.

Shapes: N tokens, M tokens of a grain, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.grain_attention import GRADIENTS, aligned, on_grid, split_rows
from fsdptoys.models.grains import add_products
from fsdptoys.models.linear import linear


def grain_loss_sum(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, logits_loss: Callable[[Tensor, Tensor], Tensor], grain: int
) -> Tensor:
    """The loss summed over valid labels, a float64 scalar.

    Args:
        hidden_ND: in the compute dtype.
        weight_VD: float64.
        labels_N: classes, or ``IGNORE_INDEX``.
        logits_loss: ``logits_loss(logits_MV, labels_M)``: the sum of a grain's losses, from float32 logits.
        grain: tokens of a grain.
    """
    return _PlainLoss.apply(hidden_ND, weight_VD, labels_N, logits_loss, grain)


def grain_chunked_loss_sum(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, loss_fn: Callable[..., Tensor], grain: int
) -> Tensor:
    """The same without kept logits; ``loss_fn(hidden_MD, weight_VD, labels_M)`` is the chunked loss of a grain."""
    return _RecomputedLoss.apply(hidden_ND, weight_VD, labels_N, loss_fn, grain)


class _PlainLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        logits_loss: Callable[[Tensor, Tensor], Tensor],
        grain: int,
    ) -> Tensor:
        cast_VD = weight_VD.to(hidden_ND.dtype)
        keeps = any(ctx.needs_input_grad)
        logits_NV = hidden_ND.new_empty(len(hidden_ND) if keeps else 0, len(weight_VD))
        total = hidden_ND.new_zeros((), dtype=torch.float64)
        for rows in split_rows(len(hidden_ND), grain):
            logits_MV = linear(aligned(hidden_ND[rows]), cast_VD)
            total += logits_loss(logits_MV.float(), labels_N[rows])
            if keeps:
                logits_NV[rows] = logits_MV
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, logits_NV)
        ctx.settings = logits_loss, grain
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, logits_NV = ctx.saved_tensors
        logits_loss, grain = ctx.settings
        cast_DV = weight_VD.to(hidden_ND.dtype).t()
        grad_hidden_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
        grads, inputs = [], []
        for rows in split_rows(len(hidden_ND), grain):
            leaf_MV = aligned(logits_NV[rows]).float().requires_grad_()
            with torch.enable_grad():
                loss = logits_loss(leaf_MV, labels_N[rows])
            (grad_MV,) = torch.autograd.grad(loss, leaf_MV, upstream.to(loss.dtype))
            grad_MV = grad_MV.to(hidden_ND.dtype)
            grad_hidden_ND[rows] = linear(grad_MV, cast_DV)
            grads.append(grad_MV)
            inputs.append(aligned(hidden_ND[rows]))
        grad_weight_VD = torch.zeros_like(weight_VD, memory_format=torch.contiguous_format)
        add_products(grad_weight_VD, grads, inputs)
        return grad_hidden_ND, grad_weight_VD, None, None, None


class _RecomputedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, loss_fn: Callable[..., Tensor], grain: int
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.settings = loss_fn, grain
        cast_VD = weight_VD.detach().to(hidden_ND.dtype)
        total = hidden_ND.new_zeros((), dtype=torch.float64)
        for rows in split_rows(len(hidden_ND), grain):
            total += loss_fn(aligned(hidden_ND[rows]).detach(), cast_VD, labels_N[rows])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_ND, weight_VD, labels_N), (loss_fn, grain) = ctx.saved_tensors, ctx.settings
        cast_VD = weight_VD.detach().to(hidden_ND.dtype).requires_grad_()
        grad_hidden_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
        grad_weight_VD = torch.zeros_like(weight_VD, memory_format=torch.contiguous_format)
        for rows in split_rows(len(hidden_ND), grain):
            leaf_MD = aligned(hidden_ND[rows]).detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_fn(leaf_MD, cast_VD, labels_N[rows])
            grad_hidden_ND[rows], grad_VD = torch.autograd.grad(loss, [leaf_MD, cast_VD], upstream.to(loss.dtype))
            grad_weight_VD += on_grid(grad_VD, GRADIENTS)
        return grad_hidden_ND, grad_weight_VD, None, None, None
