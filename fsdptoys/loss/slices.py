"""The training loss grain by grain, over fixed slices of the classes, which ranks may split
(``exact.slices``).

Largest logits are exact. Each slice's exponentials are added in float32, over slices and ranks in
float64, on a grid of multiples of 2⁻³⁰ on which such sums are exact. The rest is as in ``grains``:
products of one grain at a time, gradients of the weight added over grains, and here also those of
hidden states over slices, in float64.

Shapes: N tokens, C tokens of a chunk, D width, V classes of this rank, W classes of a slice.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.exact.attention import ACTIVATIONS, on_grid
from fsdptoys.exact.products import LANES, add_weight_gradient, multiply

from .grains import LOSSES, chunk_tokens
from .objective import IGNORE_INDEX, Objective
from .vocabulary import Vocabulary


class SliceSettings(NamedTuple):
    """Sizes and dtype."""

    number: int
    """Slices of this rank's classes."""
    grain: int
    """Tokens of a grain."""
    dtype: torch.dtype
    """Of the computation."""
    keeps_logits: bool
    """Keep logits for the backward rather than make them again."""


def slices_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective,
    vocabulary: Vocabulary,
    settings: SliceSettings,
) -> Tensor:
    """The loss summed over the valid labels among this rank's rows, a float64 scalar.

    Args:
        hidden_ND: float64, equal on all ranks.
        weight_VD: float64, of this rank's classes.
        labels_N: classes of all ranks, or ``IGNORE_INDEX``.
        objective: function of the logits to minimize.
        vocabulary: the ranks.
        settings: of this rank.
    """
    return _SlicesLoss.apply(
        hidden_ND, weight_VD, labels_N, objective, vocabulary, settings
    )


class _SlicesLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        objective: Objective,
        vocabulary: Vocabulary,
        settings: SliceSettings,
    ) -> Tensor:
        cast_ND = hidden_ND.to(settings.dtype)
        weights = _cast(weight_VD, settings)
        logits: list[list[Tensor]] = []
        losses = []
        for rows in chunk_tokens(cast_ND, len(weight_VD), settings.grain):
            slice_logits = [
                multiply(cast_ND[rows], weight_WD, None, settings.grain)
                for weight_WD in weights
            ]
            losses.append(
                _softmax(
                    slice_logits, labels_N[rows], objective, vocabulary, gradient=False
                )[0]
            )
            logits += (
                [slice_logits]
                if settings.keeps_logits and any(ctx.needs_input_grad)
                else []
            )
        ctx.save_for_backward(
            cast_ND,
            weight_VD,
            labels_N,
            *(logits_CW for slice_logits in logits for logits_CW in slice_logits),
        )
        ctx.settings = objective, vocabulary, settings
        losses_N = torch.cat(losses)
        return on_grid(losses_N[vocabulary.own_rows(len(losses_N))], LOSSES).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cast_ND, weight_VD, labels_N, *logits = ctx.saved_tensors
        objective, vocabulary, settings = ctx.settings
        weights = _cast(weight_VD, settings)
        size = len(weight_VD) // settings.number
        grad_hidden_ND = torch.zeros_like(cast_ND, dtype=torch.float64)
        grad_weight_VD = torch.zeros_like(
            weight_VD, memory_format=torch.contiguous_format
        )
        for chunk, rows in enumerate(
            chunk_tokens(cast_ND, len(weight_VD), settings.grain)
        ):
            slice_logits = logits[
                chunk * settings.number : (chunk + 1) * settings.number
            ]
            slice_logits = slice_logits or [
                multiply(cast_ND[rows], weight_WD, None, settings.grain)
                for weight_WD in weights
            ]
            _, gradients = _softmax(
                slice_logits, labels_N[rows], objective, vocabulary, gradient=True
            )
            for index, (weight_WD, values_CW) in enumerate(
                zip(weights, gradients, strict=True)
            ):
                grad_CW = values_CW.mul_(upstream.to(torch.float32)).to(settings.dtype)
                product = multiply(grad_CW, weight_WD.t(), None, settings.grain)
                grad_hidden_ND[rows] += on_grid(product, ACTIVATIONS)
                total_WD = grad_weight_VD[index * size : (index + 1) * size]
                add_weight_gradient(total_WD, grad_CW, cast_ND[rows], settings.grain)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def _cast(weight_VD: Tensor, settings: SliceSettings) -> list[Tensor]:
    """The slices of a weight in the compute dtype, each in memory of its own."""
    return [
        weight_WD.to(settings.dtype, copy=True)
        for weight_WD in weight_VD.chunk(settings.number)
    ]


def _softmax(
    logits: list[Tensor],
    labels_C: Tensor,
    objective: Objective,
    vocabulary: Vocabulary,
    *,
    gradient: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Losses in float32, and gradients of the logits of each slice. A collective.

    Rows are padded until a vectorized loop leaves none to its tail.
    """
    smoothing = objective.label_smoothing
    z_loss_coef = objective.z_loss_coef
    rows, size = logits[0].shape
    missing = -rows % LANES
    classes = size * len(logits)
    labels_C = F.pad(labels_C, (0, missing), value=IGNORE_INDEX)
    values = [
        F.pad(values_CW.float(), (0, 0, 0, missing)).clone() for values_CW in logits
    ]
    local_C, inside_C = vocabulary.local_labels(labels_C, classes)
    top_C = vocabulary.max_(
        torch.stack([values_CW.amax(1) for values_CW in values]).amax(0)
    )
    sums_3C = torch.zeros(3, len(labels_C), dtype=torch.float64, device=labels_C.device)
    places = [
        (local_C - index * size, inside_C & (local_C // size == index))
        for index in range(len(logits))
    ]
    for values_CW, (place_C, here_C) in zip(values, places, strict=True):
        picked_C = values_CW.gather(1, place_C.clamp(0, size - 1)[:, None])[:, 0]
        sums_3C[1] += torch.where(here_C, picked_C, 0.0)
        if smoothing:
            sums_3C[2] += on_grid(values_CW.sum(1), LOSSES)
        sums_3C[0] += on_grid(values_CW.sub_(top_C[:, None]).exp_().sum(1), LOSSES)
    sum_C, label_C, total_C = vocabulary.sum_(sums_3C).unbind()
    log_sum_C = sum_C.log()
    losses_C = (1 - smoothing) * (top_C - label_C) + log_sum_C
    if smoothing:
        losses_C += smoothing * (top_C - total_C / (classes * vocabulary.ranks))
    if z_loss_coef:
        losses_C += z_loss_coef * (top_C + log_sum_C).square()
    ignored_C = labels_C == IGNORE_INDEX
    losses_C = losses_C.float().masked_fill_(ignored_C, 0.0)[:rows]
    if not gradient:
        return losses_C, []
    factor_C = 1 / sum_C
    if z_loss_coef:
        factor_C *= 1 + 2 * z_loss_coef * (top_C + log_sum_C)
    for values_CW, (place_C, here_C) in zip(values, places, strict=True):
        values_CW.mul_(factor_C.float()[:, None])
        if smoothing:
            values_CW.sub_(smoothing / (classes * vocabulary.ranks))
        at_label_C1 = (here_C * (smoothing - 1))[:, None].to(values_CW.dtype)
        values_CW.scatter_add_(1, place_C.clamp(0, size - 1)[:, None], at_label_C1)
        values_CW.masked_fill_(ignored_C[:, None], 0.0)
    return losses_C, [values_CW[:rows] for values_CW in values]
