"""Rotation of queries and keys by rotary angles (arXiv:2104.09864), by PyTorch's own operators.

Shapes: B batch, T sequence, H heads, K width of a head.
"""

from enum import Enum

import torch
from torch import Tensor


class Pairs(Enum):
    """The two elements of a head that a rotary angle turns."""

    halves = "halves"
    """i and i + K/2."""
    neighbors = "neighbors"
    """2i and 2i + 1."""


def rotary(x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Turn pairs by their angles, in float32, and return the input's dtype; cosines and sines are
    (T, K/2).

    On CUDA the result is a view of a contiguous (B, T, H, K), like an input from a projection.
    Attention kernels write their result in the strides of the queries, so that its heads are joined
    without a copy. Elsewhere it is contiguous: the strides also change the order of sums, and so
    the bits, in the gradients of norms of heads.
    """
    if x_BHTK.device.type in ("cpu", "npu"):
        return turn(x_BHTK, cos, sin, pairs)
    return turn(
        x_BHTK.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1), pairs
    ).transpose(1, 2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """``rotary`` with tables that broadcast to the pairs; the result is contiguous."""
    wide = x.float()
    if pairs is Pairs.halves:
        first, second = wide.chunk(2, dim=-1)
        return torch.cat(
            (first * cos - second * sin, second * cos + first * sin), dim=-1
        ).to(x.dtype)
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )
    return turned.flatten(-2).to(x.dtype)
