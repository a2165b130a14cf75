"""Sums over features in fixed slices, for a model with grains (``exact.ops``) whose features ranks
may split.

Whatever is added over features (heads into the residual stream, hidden channels likewise, gradients
of a layer's input over its columns, the weights of norms of heads) is computed for each of S slices
of the features by itself, in the compute dtype, rounded to a grid, and added in float64. Ranks that
split features have whole slices, and add theirs in float64 too, so that one process with S slices
has the same bits.

Layers therefore get their input in float64, so that its gradients, also those of several
projections, add up in float64 before one rounding. The price: matmuls of fewer columns, casts, and
float64 sums of activations.

Shapes: N rows, I and O inner and outer width of a matmul, B batch, T sequence, H heads of a rank, K
width of a head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.exchange import Exchange, Split

from .attention import ACTIVATIONS, GRADIENTS, on_grid
from .ops import ExactOps
from .products import add_weight_gradient, multiply, sum_rows


class Float64Exchange(Exchange):
    """One rank has all features and tokens; layers get their input in float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def enter(self, hidden: Tensor) -> Tensor:
        """The same in float64; its gradient is rounded once."""
        return hidden.double()

    def leave(self, partial: Tensor) -> Tensor:
        """The same in the compute dtype."""
        return partial.to(self.dtype)


@dataclass(frozen=True)
class SlicedOps(ExactOps):
    """``ExactOps`` over fixed slices of features."""

    whole: ExactOps = field(default_factory=ExactOps)
    """The same over all features at once."""
    number: int = 1
    """Slices of this rank."""

    def slices(self, width: int) -> Iterator[slice]:
        """The slices of a width."""
        size = width // self.number
        return (slice(start, start + size) for start in range(0, width, size))

    @property
    def exchanged_dtype(self) -> torch.dtype:
        """See ``Ops``."""
        return self.dtype

    def split_features(self, ranks: int) -> "SlicedOps":
        """See ``Ops``."""
        return slice_features(self.whole, self.number // ranks)

    def linear_columns(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """See ``Ops``."""
        rows_NI = input.reshape(-1, input.shape[-1])
        out_NO: Tensor = _Columns.apply(rows_NI, weight, bias, self)
        return out_NO.view(*input.shape[:-1], -1)

    def linear_rows(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange
    ) -> Tensor:
        """See ``Ops``."""
        output = exchange.leave(self.sum_slices(input, weight))
        if bias is None:
            return output
        return output + self.expand(exchange.sum_gradient(bias), output)

    def sum_slices(self, input: Tensor, weight: Tensor) -> Tensor:
        """The product summed over this rank's slices, in float64."""
        sums_NO: Tensor = _Rows.apply(input.reshape(-1, input.shape[-1]), weight, self)
        return sums_NO.view(*input.shape[:-1], -1)

    def per_channel(
        self,
        function: Callable[..., Tensor],
        hidden: Tensor,
        params: Sequence[Tensor],
        split: Split | None,
    ) -> Tensor:
        """See ``Ops``."""

        def combine(hidden: Tensor, *params: Tensor) -> Tensor:
            return self.whole.per_channel(function, hidden, params, split)

        if split is Split.columns:
            return by_slices(combine, self.number, hidden, *params)
        return by_heads(combine, self.number, hidden, *params)

    def gelu(self, hidden: Tensor) -> Tensor:
        """See ``Ops``."""
        return by_slices(super().gelu, self.number, hidden)


def slice_features(whole: ExactOps, number: int) -> SlicedOps:
    """Add over ``number`` slices of this rank's features."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return by_slices(whole.swiglu, number, gate, up)

    def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if weight is None:
            return whole.rms_norm(hidden, weight, eps)
        return by_heads(whole.rms_norm, number, hidden, weight, eps)

    fields = vars(whole) | {"swiglu": swiglu, "rms_norm": rms_norm}
    return SlicedOps(**fields, whole=whole, number=number)


def by_slices(function: Callable[..., Tensor], number: int, *inputs: Tensor) -> Tensor:
    """Apply a function to each slice by itself: a vectorized loop's tail depends on the width."""
    parts = zip(*(input.chunk(number, -1) for input in inputs), strict=True)
    return torch.cat(
        [function(*(input.contiguous() for input in part)) for part in parts], -1
    )


def by_heads(
    function: Callable[..., Tensor], number: int, hidden: Tensor, *args: Any
) -> Tensor:
    """Apply a function to each slice of heads (B, T, H, K), over which gradients are summed; to
    all of a tensor of tokens (B, T, D)."""
    if hidden.ndim != 4:
        return function(hidden, *args)
    return torch.cat([function(part, *args) for part in hidden.chunk(number, 2)], 2)


class _Columns(torch.autograd.Function):
    """``torch.nn.functional.linear`` of a float64 input; its output has the compute dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        ops: SlicedOps,
    ) -> Tensor:
        cast_NI = input_NI.to(ops.dtype)
        ctx.save_for_backward(cast_NI, weight_OI)
        ctx.ops = ops
        out_NO = cast_NI.new_empty(len(cast_NI), len(weight_OI))
        for part in ops.slices(len(weight_OI)):
            bias = None if bias_O is None else bias_O[part].to(ops.dtype)
            out_NO[:, part] = multiply(
                cast_NI, _cast(weight_OI[part], ops), bias, ops.grain
            )
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        cast_NI, weight_OI = ctx.saved_tensors
        ops = ctx.ops
        total_NI = torch.zeros_like(cast_NI, dtype=torch.float64)
        total_OI = torch.zeros_like(weight_OI, memory_format=torch.contiguous_format)
        biases = []
        for part in ops.slices(len(weight_OI)):
            piece = grad_NO[:, part].contiguous()
            product = multiply(piece, _cast(weight_OI[part], ops).t(), None, ops.grain)
            total_NI += on_grid(product, ACTIVATIONS)
            add_weight_gradient(total_OI[part], piece, cast_NI, ops.grain)
            biases += [sum_rows(piece, ops.grain)] if ctx.needs_input_grad[2] else []
        return total_NI, total_OI, torch.cat(biases) if biases else None, None


class _Rows(torch.autograd.Function):
    """``torch.nn.functional.linear`` summed over slices of the input, in float64."""

    @staticmethod
    def forward(
        ctx: Any, input_NI: Tensor, weight_OI: Tensor, ops: SlicedOps
    ) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        ctx.ops = ops
        total_NO = input_NI.new_zeros(
            len(input_NI), len(weight_OI), dtype=torch.float64
        )
        for part in ops.slices(weight_OI.shape[1]):
            product = multiply(
                input_NI[:, part].contiguous(),
                _cast(weight_OI[:, part], ops),
                None,
                ops.grain,
            )
            total_NO += on_grid(product, GRADIENTS)
        return total_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        input_NI, weight_OI = ctx.saved_tensors
        ops = ctx.ops
        grad_NO = grad_NO.to(ops.dtype).contiguous()
        grad_NI = torch.empty_like(input_NI, memory_format=torch.contiguous_format)
        total_OI = torch.zeros_like(weight_OI, memory_format=torch.contiguous_format)
        for part in ops.slices(weight_OI.shape[1]):
            grad_NI[:, part] = multiply(
                grad_NO, _cast(weight_OI[:, part], ops).t(), None, ops.grain
            )
            add_weight_gradient(
                total_OI[:, part], grad_NO, input_NI[:, part].contiguous(), ops.grain
            )
        return grad_NI, total_OI, None


def _cast(weight: Tensor, ops: SlicedOps) -> Tensor:
    """A slice of a float64 weight in the compute dtype, in memory of its own."""
    return weight.to(ops.dtype).contiguous()
