"""Losses as a user writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.loss import LossConfig
from fsdptoys.loss.objective import IGNORE_INDEX


def entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV, labels_N, reduction="none")


@dataclass
class OwnConfig(LossConfig):
    """The cross entropy, as a loss of tokens."""

    name: ClassVar[str] = "own"

    def build(self) -> Callable[..., Tensor]:
        """Return the function."""
        return entropy


@dataclass
class FocalConfig(LossConfig):
    """(1 - p)^gamma · cross entropy (arXiv:1708.02002)."""

    name: ClassVar[str] = "focal"

    gamma: float = 2.0

    def build(self) -> Callable[..., Tensor]:
        """Return the function."""

        def losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
            entropy_N = entropy(logits_NV, labels_N)
            return (1 - (-entropy_N).exp()) ** self.gamma * entropy_N

        return losses


@dataclass
class WholeConfig(LossConfig):
    """The cross entropy, with the head's product."""

    name: ClassVar[str] = "whole"
    takes_hidden_states: ClassVar[bool] = True

    def build(self) -> Callable[..., Tensor]:
        """Return the function."""

        def loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
            return F.cross_entropy(
                (hidden_ND @ weight_VD.t()).float(),
                labels_N,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )

        return loss


@dataclass
class BrokenConfig(LossConfig):
    """Losses with the mistakes that a user can make, by name."""

    name: ClassVar[str] = "broken"

    kind: str = "mean"

    def build(self) -> Callable[..., Tensor]:
        """Return the function."""
        return _Learned() if self.kind == "learned" else BROKEN[self.kind]


class _Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return self.scale * entropy(logits_NV, labels_N)


def _by_value(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return entropy(logits_NV, labels_N) * (1.0 if logits_NV.sum() < 1e9 else 2.0)


BROKEN: dict[str, Callable[..., Tensor]] = {
    "mean": lambda logits_NV, labels_N: entropy(logits_NV, labels_N).mean(),
    "mixed": lambda logits_NV, labels_N: (
        entropy(logits_NV, labels_N) / entropy(logits_NV, labels_N).detach().max()
    ),
    "detached": lambda logits_NV, labels_N: entropy(logits_NV, labels_N).detach(),
    "infinite": lambda logits_NV, labels_N: entropy(logits_NV, labels_N) * torch.inf,
    "by_value": _by_value,
    "fails": lambda logits_NV, labels_N: logits_NV.gather(1, labels_N),
}
