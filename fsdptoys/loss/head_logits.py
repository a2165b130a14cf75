"""Logits of a head, with what a model does to them.

Shapes: N tokens, D width, V vocabulary.
"""

import torch
from torch import Tensor

from fsdptoys.models.linear import linear


def head_logits(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return ``hidden @ weight.T``, in the parameters' dtype.

    Without a weight ``hidden`` are the logits. A bias is added to the logits. With a soft cap c
    they become ``c · tanh(logits / c)``.
    """
    logits_NV = hidden_ND if weight_VD is None else linear(hidden_ND, weight_VD)
    if bias_V is not None:
        logits_NV = logits_NV + bias_V
    if softcap is not None:
        logits_NV = torch.tanh(logits_NV / softcap) * softcap
    return logits_NV
