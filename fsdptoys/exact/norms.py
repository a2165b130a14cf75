"""Norms that add gradients of weights grain by grain (``exact.ops``).

Each row is normalized by itself, with operations that round alike wherever an element lies. So rows
are taken many at a time, as many as fit in a cache; only the sums over tokens need the borders of
grains.

Shapes: N rows, R rows at a time, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .products import chunk_rows, reduce_rows, sum_rows


class RMSNorm(torch.autograd.Function):
    """``Ops.rms_norm`` in float32, with a float64 weight."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_D: Tensor, eps: float, grain: int
    ) -> Tensor:
        """``grain`` counts rows."""
        scale_D = weight_D.to(hidden_ND.dtype).float()
        out_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
        factor_N1 = hidden_ND.new_empty(len(hidden_ND), 1, dtype=torch.float32)
        for rows in chunk_rows(hidden_ND, grain):
            wide_RD = hidden_ND[rows].float()
            torch.rsqrt(_means(wide_RD.square(), grain).add_(eps), out=factor_N1[rows])
            out_ND[rows] = (wide_RD * factor_N1[rows]).mul_(scale_D)
        ctx.save_for_backward(hidden_ND, weight_D, factor_N1)
        ctx.grain = grain
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a row needs its mean product with the normalized row."""
        hidden_ND, weight_D, factor_N1 = ctx.saved_tensors
        scale_D = weight_D.to(hidden_ND.dtype).float()
        grad_hidden_ND = torch.empty_like(
            hidden_ND, memory_format=torch.contiguous_format
        )
        total_D = torch.zeros_like(weight_D)
        for rows in chunk_rows(hidden_ND, ctx.grain):
            grad_RD = grad_ND[rows].float()
            normal_RD = hidden_ND[rows].float() * factor_N1[rows]
            product_RD = grad_RD * normal_RD
            total_D += sum_rows(product_RD, ctx.grain)
            mean_R1 = _means(product_RD.mul_(scale_D), ctx.grain)
            grad_hidden_ND[rows] = (
                (grad_RD * scale_D).sub_(normal_RD.mul_(mean_R1)).mul_(factor_N1[rows])
            )
        return grad_hidden_ND, total_D, None, None


def _means(rows_RD: Tensor, grain: int) -> Tensor:
    return reduce_rows(lambda some_RD: some_RD.mean(-1, keepdim=True), rows_RD, grain)


class LayerNorm(torch.autograd.Function):
    """``torch.nn.functional.layer_norm`` with float64 weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        grain: int,
    ) -> Tensor:
        """Rows by PyTorch's kernel."""
        shape = list(weight_D.shape)
        params = [param.to(hidden_ND.dtype) for param in (weight_D, bias_D)]
        out_ND, mean_N1, factor_N1 = torch.native_layer_norm(
            hidden_ND.contiguous(), shape, params[0], params[1], eps
        )
        ctx.save_for_backward(hidden_ND, weight_D, bias_D, mean_N1, factor_N1)
        ctx.settings = shape, grain
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        """Rows by PyTorch's kernel, sums over rows by grains."""
        hidden_ND, weight_D, bias_D, mean_N1, factor_N1 = ctx.saved_tensors
        shape, grain = ctx.settings
        params = [param.to(hidden_ND.dtype) for param in (weight_D, bias_D)]
        grad_ND, hidden_ND = grad_ND.contiguous(), hidden_ND.contiguous()
        grad_hidden_ND, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_ND, hidden_ND, shape, mean_N1, factor_N1, *params, [True, False, False]
        )
        totals = [torch.zeros_like(param) for param in (weight_D, bias_D)]
        for rows in chunk_rows(hidden_ND, grain):
            grad_RD = grad_ND[rows].float()
            normal_RD = (hidden_ND[rows].float() - mean_N1[rows]) * factor_N1[rows]
            totals[0] += sum_rows(grad_RD * normal_RD, grain)
            totals[1] += sum_rows(grad_RD, grain)
        return grad_hidden_ND, *totals, None, None
