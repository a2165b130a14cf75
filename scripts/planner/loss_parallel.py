"""PyTorch's ``loss_parallel`` (``torch/distributed/tensor/parallel/loss.py``) on plain tensors, for
traces.

torchtitan uses it where ranks split the vocabulary. It keeps log-probabilities and makes three more
float32 tensors of the logits' size in its backward; the trainer's own loss keeps one tensor and
changes it in place. Operators and collectives are PyTorch's, in their order.

Shapes: N tokens, V classes of this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.loss.objective import IGNORE_INDEX, Objective
from fsdptoys.loss.vocabulary import Vocabulary


class LossParallel(torch.autograd.Function):
    """The sum of the cross entropies of this rank's rows; takes the place of
    ``vocabulary._LogitsLoss``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        objective: Objective,
        vocabulary: Vocabulary,
    ) -> Tensor:
        """Losses of all tokens from kept log-probabilities; objectives other than cross entropy are
        not covered."""
        assert not objective.label_smoothing and not objective.z_loss_coef
        wide_NV = logits_NV.float()
        shifted_NV = wide_NV - vocabulary.max_(wide_NV.amax(1, keepdim=True))
        sum_N1 = vocabulary.sum_(torch.exp(shifted_NV).sum(1, keepdim=True))
        log_probs_NV = shifted_NV - torch.log(sum_N1)
        local_N, inside_N = vocabulary.local_labels(labels_N, logits_NV.shape[1])
        label_N = torch.where(
            inside_N, log_probs_NV.gather(1, local_N[:, None])[:, 0], 0.0
        )
        losses_N = torch.where(labels_N != IGNORE_INDEX, -vocabulary.sum_(label_N), 0.0)
        ctx.save_for_backward(log_probs_NV, labels_N)
        ctx.settings = logits_NV.dtype, vocabulary
        return losses_N[vocabulary.own_rows(len(losses_N))].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all rows, out of place as in PyTorch."""
        log_probs_NV, labels_N = ctx.saved_tensors
        dtype, vocabulary = ctx.settings
        local_N, inside_N = vocabulary.local_labels(labels_N, log_probs_NV.shape[1])
        grad_NV = torch.zeros_like(log_probs_NV)
        grad_NV.scatter_(1, local_N[:, None], -inside_N.to(grad_NV.dtype)[:, None])
        upstream_N1 = torch.where(labels_N != IGNORE_INDEX, upstream, 0.0)[:, None]
        return (
            ((grad_NV + torch.exp(log_probs_NV)) * upstream_N1).to(dtype),
            None,
            None,
            None,
        )
