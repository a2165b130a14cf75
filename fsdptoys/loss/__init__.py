"""The loss that the head computes inside its own forward: the sum over valid labels, a float32 scalar.

``build_loss`` chooses between two ways to the same numbers. The plain one makes all logits, N·V of them, and leaves the
gradients to autograd. The chunked one (``chunked_loss``) makes a few rows at a time, and their gradients with them.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.models.linear import linear

from .chunked import GradientDType, chunked_loss_sum
from .objective import IGNORE_INDEX, Objective

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``loss_fn(hidden_ND, weight_VD, labels_N)``: the loss summed over valid labels, a float32 scalar."""


def build_loss(
    chunk_loss: bool,
    chunk_tokens: int | None = None,
    grad_dtype: GradientDType = GradientDType.float32,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
) -> LossFn:
    """The loss to train with.

    Args:
        chunk_loss: compute loss and gradients over chunks of tokens.
        chunk_tokens: tokens a chunk; None chooses (see ``chunked_loss.auto_chunk_tokens``).
        grad_dtype: in what the gradient of the head's weight is added up over chunks.
        objective: what is minimised.
    """
    if chunk_loss:
        return functools.partial(
            chunked_loss_sum, objective=objective, chunk_tokens=chunk_tokens, grad_dtype=grad_dtype
        )
    return cross_entropy_sum if objective == Objective() else functools.partial(loss_sum, objective=objective)


def cross_entropy_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Cross entropy of ``hidden @ weight.T`` summed over valid labels, in nats, as a float32 scalar.

    Makes the logits whole, once in the parameters' dtype and twice in float32: N·V·(2 + 4 + 4) bytes in bf16.
    """
    return loss_sum(hidden_ND, weight_VD, labels_N, Objective())


def loss_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, objective: Objective) -> Tensor:
    """The objective over whole logits, summed over valid labels, as a float32 scalar."""
    logits_NV = linear(hidden_ND, weight_VD).float()
    loss = F.cross_entropy(
        logits_NV,
        labels_N,
        ignore_index=IGNORE_INDEX,
        label_smoothing=objective.label_smoothing,
        reduction="sum",
    )
    if objective.z_loss_coef == 0:
        return loss
    squares_N = torch.where(labels_N == IGNORE_INDEX, 0.0, logits_NV.logsumexp(dim=-1).square())
    return loss + objective.z_loss_coef * squares_N.sum()
