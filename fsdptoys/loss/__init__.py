"""The training loss, computed inside the head's forward: the sum over valid labels, a float32
scalar.

``build_loss`` chooses between two implementations. The plain one makes all N·V logits and leaves
gradients to autograd; the chunked one (``chunked``) makes the logits of a few rows at a time, and
their gradients with them. A user's loss (``own``) has both forms too.

``LOSSES`` is the registry of configurations (``config``).
"""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.register import registry

from .chunked import chunked_loss_sum
from .config import CrossEntropyConfig, LossConfig
from .grains import grain_loss_sum
from .head_logits import head_logits
from .objective import IGNORE_INDEX, Objective
from .own import OwnLoss, own_loss_sum
from .slices import SliceSettings, slices_loss_sum
from .vocabulary import Vocabulary, vocabulary_loss_sum

LOSSES: Mapping[str, type[LossConfig]] = registry(
    "loss", {CrossEntropyConfig.name: CrossEntropyConfig}
)
"""The word after ``loss=`` → configuration class, also those that own code registers."""

LossFn = Callable[..., Tensor]
"""``loss_fn(hidden_ND, weight_VD, labels_N)``: the loss summed over valid labels, a float32 scalar.

A head with a bias or a soft cap on its logits also passes ``bias_V`` and ``softcap`` by name.
"""


def build_loss(
    chunk_loss: bool,
    chunk_tokens: int | None = None,
    grad_dtype: torch.dtype = torch.float32,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    grain: int | None = None,
    vocabulary: Vocabulary | None = None,
    slices: int = 1,
    dtype: torch.dtype = torch.float32,
    own: OwnLoss | None = None,
) -> LossFn:
    """Choose the loss function.

    Args:
        chunk_loss: compute loss and gradients over chunks of tokens.
        chunk_tokens: tokens per chunk; None for ``chunked.auto_chunk_tokens``.
        grad_dtype: float32 or bfloat16, in which the gradient of the head's weight is summed over
            chunks.
        objective: function of the logits to minimize.
        grain: tokens of a grain, for a model with grains (``exact.ops``): the loss is float64 then;
            else None.
        vocabulary: ranks that split the classes, or one that adds over slices of them; None where
            each has all.
        slices: with ``grain`` and ``vocabulary``: of this rank's classes.
        dtype: with ``slices``: of the computation, as hidden states come in float64.
        own: a user's loss in place of the objective, of which it takes ``gradient_scale`` only;
            excludes ``grain`` and ``vocabulary``.
    """
    if own is not None:
        assert grain is None and vocabulary is None
        if own.takes_hidden_states:
            return own.sum_over_head
        if not chunk_loss:
            return functools.partial(own_loss_sum, own=own)
    if grain is not None and vocabulary is not None:
        return functools.partial(
            slices_loss_sum,
            objective=objective,
            vocabulary=vocabulary,
            settings=SliceSettings(slices, grain, dtype, keeps_logits=not chunk_loss),
        )
    if grain is not None:
        return functools.partial(
            grain_loss_sum,
            objective=objective,
            grain=grain,
            keeps_logits=not chunk_loss,
        )
    if chunk_loss:
        return functools.partial(
            chunked_loss_sum,
            objective=objective,
            chunk_tokens=chunk_tokens,
            grad_dtype=grad_dtype,
            vocabulary=vocabulary,
            own=own,
        )
    if vocabulary is not None:
        return functools.partial(
            vocabulary_loss_sum, objective=objective, vocabulary=vocabulary
        )
    return functools.partial(cross_entropy_sum, objective=objective)


def cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The objective of ``hidden @ weight.T`` summed over valid labels, in nats, as a float32
    scalar.

    For bias and soft cap see ``head_logits``. Without a weight ``hidden`` are the logits.

    Makes the full logits, once in the parameters' dtype and twice in float32: N·V·(2 + 4 + 4) bytes
    in bf16.
    """
    logits_NV = head_logits(hidden_ND, weight_VD, bias_V, softcap)
    return logits_loss_sum(logits_NV.float(), labels_N, objective)


def logits_loss_sum(
    logits_NV: Tensor, labels_N: Tensor, objective: Objective
) -> Tensor:
    """The objective of float32 logits, summed over valid labels."""
    loss = F.cross_entropy(
        logits_NV,
        labels_N,
        ignore_index=IGNORE_INDEX,
        label_smoothing=objective.label_smoothing,
        reduction="sum",
    )
    if objective.z_loss_coef == 0:
        return loss
    squares_N = torch.where(
        labels_N == IGNORE_INDEX, 0.0, logits_NV.logsumexp(dim=-1).square()
    )
    return loss + objective.z_loss_coef * squares_N.sum()


__all__ = [
    "LOSSES",
    "CrossEntropyConfig",
    "LossConfig",
    "LossFn",
    "OwnLoss",
    "Vocabulary",
    "build_loss",
    "cross_entropy_sum",
    "logits_loss_sum",
]
