"""Layout mode (``train.deterministic=layout``): operations with the same bits under every
layout."""

import torch

from fsdptoys.models import DecoderModel
from fsdptoys.models.ops import use_exchange, use_ops

from .attention import Float64Context
from .ops import exact_ops
from .slices import Float64Exchange, slice_features

__all__ = ["Float64Context", "use_exact_ops"]


def use_exact_ops(
    model: DecoderModel, grain: int, dtype: torch.dtype, slices: int = 1
) -> None:
    """Let a model compute exactly; the operations that it has must be PyTorch's own.

    Args:
        model: not wrapped yet.
        grain: tokens of a grain; divides the tokens of a rank's part of a sequence.
        dtype: of the computation; parameters will be float64.
        slices: of features, over which sums are added in float64 (``slices``); 1 for none.
    """
    ops = exact_ops(model.ops, grain, dtype)
    if slices > 1:
        ops = slice_features(ops, slices)
        use_exchange(model, Float64Exchange(dtype))
    use_ops(model, ops)
