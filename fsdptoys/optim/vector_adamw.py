"""Padding with which PyTorch's fused AdamW on a CPU rounds every element alike, wherever it is in a
tensor.

The fused kernel reads parameter, gradient and states once, where PyTorch's default makes ten
passes. Its loop takes full vectors and then the remaining elements one by one, and the compiler
rounds the two differently: the last elements of a shard would depend on where the shard ends. So
each tensor's full vectors are updated in place, and the remainder in a copy padded to full vectors:
bits do not depend on sharding.

Cost: a copy of fewer than ``VECTOR_ELEMENTS`` elements per tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

VECTOR_ELEMENTS = 64
"""A multiple of the vector length of any dtype, and of the kernel's split of work among threads."""


def pads(device: torch.device) -> bool:
    """Return whether the fused kernel needs full vectors to round alike."""
    return device.type == "cpu"


def split_vectors(
    columns: Sequence[list[Tensor]],
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Split tensors into full vectors and padded copies of the rest.

    Args:
        columns: parameters, gradients, both moments, and step counts, which the update increments.

    Returns:
        Columns of the parts, and pairs of a remainder and its copy, which must be copied back after
        the update.
    """
    parts: list[list[Tensor]] = []
    remainders: list[tuple[Tensor, Tensor]] = []
    for param, grad, *moments, step in zip(*columns, strict=True):
        flat = [
            param.view(-1),
            grad.reshape(-1),
            *(moment.view(-1) for moment in moments),
        ]
        whole = param.numel() // VECTOR_ELEMENTS * VECTOR_ELEMENTS
        if whole < param.numel() or whole == 0:
            views = [tensor[whole:] for tensor in flat]
            copies = [tensor.new_zeros(VECTOR_ELEMENTS) for tensor in views]
            for copy, view in zip(copies, views, strict=True):
                copy[: view.numel()] = view
            # All but the gradient change.
            del views[1]
            outputs = [copies[0], *copies[2:]]
            remainders += zip(views, outputs, strict=True)
            parts.append([*copies, step.clone() if whole else step])
        if whole:
            parts.append([*(tensor[:whole] for tensor in flat), step])
    return [list(column) for column in zip(*parts, strict=True)], remainders
