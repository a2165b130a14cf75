"""Sums over features in fixed slices, for a model with grains (``grains``) whose features ranks may split.

Whatever is added over features (heads into the residual stream, hidden channels likewise, gradients of a layer's input
over its columns, the weights of norms of heads) is computed for each of S slices of the features by itself, in the
compute dtype, rounded to a grid, and added in float64. Ranks that split features have whole slices, and add theirs in
float64 too, so that one process with S slices has the same bits.

Layers therefore get their input in float64, so that its gradients, also those of several projections, add up in float64
before one rounding. The price: matmuls of fewer columns, casts, and float64 sums of activations.

Shapes: N rows, I and O inner and outer width of a matmul, B batch, T sequence, H heads of a rank, K width of a head.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .decoder import DecoderModel
from .grain_attention import ACTIVATIONS, GRADIENTS, on_grid
from .grain_products import Elementwise, add_weight_gradient, multiply, sum_rows
from .kernels import use_kernels
from .layers import Attention, GELUFeedForward, LMHead, SwiGLU

LAYERS: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {
    Attention: (("q_proj", "k_proj", "v_proj"), "o_proj"),
    SwiGLU: (("gate_proj", "up_proj"), "down_proj"),
    GELUFeedForward: (("up_proj",), "down_proj"),
}
"""Layer → projections whose outputs are sliced, and the one that sums over them."""


class Exchange(Protocol):
    """Where sums over features begin and end."""

    def enter(self, hidden: Tensor) -> Tensor:
        """The input of a layer in float64, of all its tokens."""

    def leave(self, sums: Tensor) -> Tensor:
        """Float64 sums over this rank's features → the output of a layer in the compute dtype."""

    def sum_gradient(self, param: Tensor) -> Tensor:
        """A parameter of whose gradient this rank may have a part."""

    def gather_classes(self, logits: Tensor) -> Tensor:
        """Logits of all classes."""


class OneRank:
    """All features and tokens are here."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def enter(self, hidden: Tensor) -> Tensor:
        """In float64; its gradient is rounded once."""
        return hidden.double()

    def leave(self, sums: Tensor) -> Tensor:
        """In the compute dtype."""
        return sums.to(self.dtype)

    def sum_gradient(self, param: Tensor) -> Tensor:
        """The parameter itself."""
        return param

    gather_classes = sum_gradient


class Slices(NamedTuple):
    """Settings of the slices of a model."""

    number: int
    """Slices of this rank."""
    grain: int
    """Tokens of a grain."""
    dtype: torch.dtype
    """Of the computation."""

    def of(self, width: int) -> Iterator[slice]:
        """The slices of a width."""
        size = width // self.number
        return (slice(start, start + size) for start in range(0, width, size))


def use_slices(model: DecoderModel, slices: Slices, exchange: Exchange) -> None:
    """Replace the forwards of layers and head, and kernels that see several slices; called again, replace these."""
    for module in model.modules():
        if isinstance(module, LMHead):
            module.forward = functools.partial(_head_forward, module, slices, exchange)  # type: ignore[method-assign]
        if type(module) not in LAYERS:
            continue
        columns, rows = LAYERS[type(module)]
        for name in columns:
            each: Any = module.get_submodule(name)
            each.forward = functools.partial(_columns_forward, each, slices)
        last: Any = module.get_submodule(rows)
        last.forward = functools.partial(_rows_forward, last, slices, exchange)
        inner = functools.partial(type(module).forward, module)
        if isinstance(module, GELUFeedForward):
            inner = functools.partial(_gelu_forward, module, slices)
        module.forward = functools.partial(_layer_forward, inner, exchange)
    plain = model.kernels if model.slices is None else model.slices[1]
    model.slices = slices, plain
    sliced = {
        "swiglu": functools.partial(_swiglu, plain.swiglu, slices),
        "rms_norm": functools.partial(_rms_norm, plain.rms_norm, slices),
    }
    use_kernels(model, dataclasses.replace(plain, **sliced))


class _Columns(torch.autograd.Function):
    """``torch.nn.functional.linear`` of a float64 input, whose output is in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, slices: Slices) -> Tensor:
        cast_NI = input_NI.to(slices.dtype)
        ctx.save_for_backward(cast_NI, weight_OI)
        ctx.slices = slices
        out_NO = cast_NI.new_empty(len(cast_NI), len(weight_OI))
        for part in slices.of(len(weight_OI)):
            bias = None if bias_O is None else bias_O[part].to(slices.dtype)
            out_NO[:, part] = multiply(cast_NI, _cast(weight_OI[part], slices), bias, slices.grain)
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        (cast_NI, weight_OI), slices = ctx.saved_tensors, ctx.slices
        total_NI = torch.zeros_like(cast_NI, dtype=torch.float64)
        total_OI = torch.zeros_like(weight_OI, memory_format=torch.contiguous_format)
        biases = []
        for part in slices.of(len(weight_OI)):
            piece = grad_NO[:, part].contiguous()
            product = multiply(piece, _cast(weight_OI[part], slices).t(), None, slices.grain)
            total_NI += on_grid(product, ACTIVATIONS)
            add_weight_gradient(total_OI[part], piece, cast_NI, slices.grain)
            biases += [sum_rows(piece, slices.grain)] if ctx.needs_input_grad[2] else []
        return total_NI, total_OI, torch.cat(biases) if biases else None, None


class _Rows(torch.autograd.Function):
    """``torch.nn.functional.linear`` summed over slices of the input, in float64."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor, slices: Slices) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        ctx.slices = slices
        total_NO = input_NI.new_zeros(len(input_NI), len(weight_OI), dtype=torch.float64)
        for part in slices.of(weight_OI.shape[1]):
            product = multiply(input_NI[:, part].contiguous(), _cast(weight_OI[:, part], slices), None, slices.grain)
            total_NO += on_grid(product, GRADIENTS)
        return total_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        (input_NI, weight_OI), slices = ctx.saved_tensors, ctx.slices
        grad_NO = grad_NO.to(slices.dtype).contiguous()
        grad_NI = torch.empty_like(input_NI, memory_format=torch.contiguous_format)
        total_OI = torch.zeros_like(weight_OI, memory_format=torch.contiguous_format)
        for part in slices.of(weight_OI.shape[1]):
            grad_NI[:, part] = multiply(grad_NO, _cast(weight_OI[:, part], slices).t(), None, slices.grain)
            add_weight_gradient(total_OI[:, part], grad_NO, input_NI[:, part].contiguous(), slices.grain)
        return grad_NI, total_OI, None


class _Bias(torch.autograd.Function):
    """A bias added to rows of tokens; its gradient is summed by grains."""

    @staticmethod
    def forward(ctx: Any, rows_NO: Tensor, bias_O: Tensor, grain: int) -> Tensor:
        ctx.grain = grain
        return rows_NO + bias_O.to(rows_NO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        return grad_NO, sum_rows(grad_NO.contiguous(), ctx.grain), None


def _cast(weight: Tensor, slices: Slices) -> Tensor:
    """A slice of a float64 weight in the compute dtype, in memory of its own."""
    return weight.to(slices.dtype).contiguous()


def _columns_forward(module: nn.Linear, slices: Slices, input: Tensor) -> Tensor:
    out_NO: Tensor = _Columns.apply(input.reshape(-1, input.shape[-1]), module.weight, module.bias, slices)
    return out_NO.view(*input.shape[:-1], -1)


def _rows_forward(module: nn.Linear, slices: Slices, exchange: Exchange, input: Tensor) -> Tensor:
    sums_NO: Tensor = _Rows.apply(input.reshape(-1, input.shape[-1]), module.weight, slices)
    out = exchange.leave(sums_NO.view(*input.shape[:-1], -1))
    if module.bias is None:
        return out
    biased: Tensor = _Bias.apply(out.reshape(-1, out.shape[-1]), exchange.sum_gradient(module.bias), slices.grain)
    return biased.view_as(out)


def _layer_forward(
    inner: Callable[..., Tensor], exchange: Exchange, hidden: Tensor, *args: Any, **options: Any
) -> Tensor:
    return inner(exchange.enter(hidden), *args, **options)


def _head_forward(
    module: LMHead,
    slices: Slices,
    exchange: Exchange,
    hidden_BTD: Tensor,
    labels_BT: Tensor | None = None,
    loss_fn: Any = None,
) -> Tensor:
    entered = exchange.enter(hidden_BTD)
    if labels_BT is None:
        return exchange.gather_classes(_columns_forward(module, slices, entered))
    return LMHead.forward(module, entered, labels_BT, loss_fn)


def _gelu_forward(module: GELUFeedForward, slices: Slices, hidden_BTD: Tensor) -> Tensor:
    up = module.up_proj(hidden_BTD)
    gelu = functools.partial(F.gelu, approximate="tanh")
    return module.down_proj(_by_slices(functools.partial(_elementwise, gelu, slices.grain), slices, up))


def _elementwise(function: Callable[..., Tensor], grain: int, part: Tensor) -> Tensor:
    made: Tensor = Elementwise.apply(function, grain, part.reshape(-1, part.shape[-1]))
    return made.view(part.shape)


def _swiglu(kernel: Callable[[Tensor, Tensor], Tensor], slices: Slices, gate: Tensor, up: Tensor) -> Tensor:
    return _by_slices(kernel, slices, gate, up)


def _by_slices(function: Callable[..., Tensor], slices: Slices, *inputs: Tensor) -> Tensor:
    """Each slice by itself, since a vectorized loop's tail depends on the width."""
    parts = zip(*(each.chunk(slices.number, -1) for each in inputs), strict=True)
    return torch.cat([function(*(each.contiguous() for each in part)) for part in parts], -1)


def _rms_norm(
    kernel: Callable[..., Tensor], slices: Slices, hidden: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """Norms of heads (B, T, H, K) by slices of heads, over which the gradient of their weight is summed."""
    if weight is None or hidden.ndim != 4:
        return kernel(hidden, weight, eps)
    return torch.cat([kernel(part, weight, eps) for part in hidden.chunk(slices.number, 2)], 2)
