"""The loss of a run: the built-in cross entropy, or one of your own.

A loss is a config dataclass with a ``build`` that returns a function of logits and labels::

    @register.loss("focal")
    @dataclass
    class FocalConfig(LossConfig):
        gamma: float = option(2.0, at_least(0), effect=Effect.training)

        def build(self):
            def losses(logits_NV, labels_N):
                entropy_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
                return (1 - (-entropy_N).exp()) ** self.gamma * entropy_N

            return losses

It returns one loss for each token. The run sums these over the valid tokens of the global batch and
divides by their number, so a loss works with any number of ranks, micro-batches and chunks.

Source of the form: the per-token losses of ``torch.nn.functional`` with ``reduction="none"``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fsdptoys.utils.options import check_options


@dataclass
class LossConfig(ABC):
    """Settings of a loss."""

    name: ClassVar[str]
    """The word after ``loss=``."""
    takes_hidden_states: ClassVar[bool] = False
    """Whether ``build`` returns ``loss_fn(hidden_ND, weight_VD, labels_N)``, which computes the
    logits itself, and returns the sum over the labels that are not -100."""

    def __post_init__(self) -> None:
        check_options("loss", self)

    @abstractmethod
    def build(self) -> Callable[..., Tensor]:
        """Return the function ``losses(logits_NV, labels_N)``: a loss for each token.

        The logits are float32. Labels are classes: a token without a label comes with label 0, and
        its loss is left out.
        """


@dataclass
class CrossEntropyConfig(LossConfig):
    """Cross entropy, with ``train.label_smoothing`` and ``train.z_loss_coef``."""

    name: ClassVar[str] = "cross_entropy"

    def build(self) -> Callable[..., Tensor]:
        """Return the cross entropy of each token, without smoothing and z-loss.

        Runs use the forms of ``build_loss``, which need less memory.
        """
        return _cross_entropy


def _cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV, labels_N, reduction="none")
