"""Orthogonalization by Newton-Schulz: approximates the nearest matrix with orthonormal rows or columns, by matmuls.

A matrix ``U S Vᵀ`` is scaled to singular values of at most 1, and ``a x + b x³ + c x⁵`` is applied to all of them,
round after round. Muon's coefficients are so steep at 0 that five rounds are enough, at the price that singular values
end between about 0.7 and 1.2 rather than at 1.

Source: https://kellerjordan.github.io/posts/muon/
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's ``a``, ``b`` and ``c``."""

EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by: zeros stay zeros."""


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Bring every singular value of a matrix near 1.

    Args:
        matrix: 2-D, in the dtype to compute in; not changed.
        steps: rounds of the polynomial.

    Returns:
        A contiguous matrix of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    # The gram matrix is then of the shorter side. Copied, so that bits do not depend on alignment.
    x = (matrix.T if tall else matrix).clone(memory_format=torch.contiguous_format)
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(steps):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T.contiguous() if tall else x


def orthogonalize_flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs of the matmuls of :func:`orthogonalize`."""
    short, long = min(rows, columns), max(rows, columns)
    return steps * (4 * short**2 * long + 2 * short**3)
