"""Errors that are allowed to layers that are spread over ranks."""

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = (torch.float64, torch.float32)


def relative(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, divided by the largest expected number."""
    assert actual is not None and expected is not None
    return (
        (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300)
    ).item()
