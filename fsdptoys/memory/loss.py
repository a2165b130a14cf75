"""The loss that the head computes inside its own forward."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of positions that do not count, as in ``F.cross_entropy``."""


def cross_entropy_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Cross entropy of ``hidden @ weight.T`` summed over valid labels, in nats, as a float32 scalar.

    Makes the logits whole, once in the parameters' dtype and once in float32: N·V·(2 + 4) bytes in bf16.
    """
    logits_NV = F.linear(hidden_ND, weight_VD)
    return F.cross_entropy(logits_NV.float(), labels_N, ignore_index=IGNORE_INDEX, reduction="sum")
