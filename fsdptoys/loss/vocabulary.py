"""The training loss of a head with classes that several ranks split (tensor parallelism), without
gathering logits.

Each of N ranks makes the logits of V/N classes for all tokens. Two all-reduces give every rank the
log-sum-exp of each row: of the largest logits, then of sums of exponentials together with the
label's logit, which one rank has. The gradient of a rank's logits needs nothing else. Numbers sent
for each token: 1 + 3.

Every rank finds the loss of every token, but reports those of its own 1/N of the rows, so that
losses add up over all ranks without a factor. The gradients are of all rows, for an upstream
gradient that is the same on all ranks.

Shapes: N tokens, D width, V classes of this rank, R rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.linear import linear

from .objective import IGNORE_INDEX, Objective


class Vocabulary:
    """Classes that ranks split evenly, in the order of ranks; one rank without a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks, self.rank = (
            (1, 0) if group is None else (group.size(), group.rank())
        )

    def max_(self, values: Tensor) -> Tensor:
        """The largest over ranks, in place. A collective."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place. A collective."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def own_rows(self, rows: int) -> slice:
        """The rows that this rank reports losses of."""
        return slice(
            rows * self.rank // self.ranks, rows * (self.rank + 1) // self.ranks
        )

    def local_labels(self, labels_R: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Each label among this rank's classes, 0 if another rank has it, and whether this one
        does."""
        local_R = labels_R - self.rank * classes
        inside_R = (local_R >= 0) & (local_R < classes)
        return torch.where(inside_R, local_R, 0), inside_R


def vocabulary_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective,
    vocabulary: Vocabulary,
) -> Tensor:
    """The objective summed over this rank's rows, a float32 scalar; keeps its logits' gradients in
    float32.

    Args:
        hidden_ND: equal on all ranks.
        weight_VD: of this rank's classes.
        labels_N: classes of all ranks, or ``IGNORE_INDEX``.
        objective: function of the logits to minimize.
        vocabulary: the ranks.
    """
    return _LogitsLoss.apply(
        linear(hidden_ND, weight_VD), labels_N, objective, vocabulary
    )


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        objective: Objective,
        vocabulary: Vocabulary,
    ) -> Tensor:
        values_NV = logits_NV.to(torch.float32, copy=True)
        gradient = ctx.needs_input_grad[0]
        losses_N = shard_gradient_(
            values_NV, labels_N, objective, vocabulary, gradient=gradient
        )
        ctx.save_for_backward(values_NV if gradient else None)
        ctx.settings = logits_NV.dtype, objective.gradient_scale
        return losses_N[vocabulary.own_rows(len(losses_N))].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (values_NV,) = ctx.saved_tensors
        dtype, scale = ctx.settings
        return (values_NV * (upstream / scale)).to(dtype), None, None, None


def shard_gradient_(
    values_RV: Tensor,
    labels_R: Tensor,
    objective: Objective,
    vocabulary: Vocabulary,
    *,
    gradient: bool,
) -> Tensor:
    """Losses of all rows; replaces float32 logits by the gradient. A collective, without a device
    sync.

    The gradient is multiplied by ``objective.gradient_scale``; without ``gradient`` the logits end
    up undefined.
    """
    smoothing = objective.label_smoothing
    z_loss_coef = objective.z_loss_coef
    classes = values_RV.shape[1]
    local_R, inside_R = vocabulary.local_labels(labels_R, classes)
    top_R = vocabulary.max_(values_RV.amax(1))
    label_R = torch.where(inside_R, values_RV.gather(1, local_R[:, None])[:, 0], 0.0)
    total_R = values_RV.sum(1) if smoothing else torch.zeros_like(top_R)
    values_RV.sub_(top_R[:, None]).exp_()
    sum_R, label_R, total_R = vocabulary.sum_(
        torch.stack([values_RV.sum(1), label_R, total_R])
    ).unbind()
    log_sum_R = sum_R.log()
    # Relative to the largest logit, against cancellation.
    losses_R = (1 - smoothing) * (top_R - label_R) + log_sum_R
    if smoothing:
        losses_R += smoothing * (top_R - total_R / (classes * vocabulary.ranks))
    logsumexp_R = top_R + log_sum_R
    if z_loss_coef:
        losses_R += z_loss_coef * logsumexp_R.square()
    ignored_R = labels_R == IGNORE_INDEX
    if gradient:
        factor_R = 1 / sum_R
        if z_loss_coef:
            factor_R *= 1 + 2 * z_loss_coef * logsumexp_R
        values_RV.mul_(factor_R[:, None])
        if smoothing:
            values_RV.sub_(smoothing / (classes * vocabulary.ranks))
        values_RV.scatter_add_(
            1,
            local_R[:, None],
            (inside_R * (smoothing - 1))[:, None].to(values_RV.dtype),
        )
        if objective.gradient_scale != 1:
            values_RV.mul_(objective.gradient_scale)
        values_RV.masked_fill_(ignored_R[:, None], 0.0)
    return losses_R.masked_fill_(ignored_R, 0.0)
