"""Operators that stand for fused kernels on a device that has none: what they return, and what they keep.

torch_npu's kernels by their names and signatures, so that ``models.npu_kernels`` runs as it is over them; what
``torch.compile`` makes of a small function, which is taken to read its inputs once and to keep them for the backward
rather than what lies between (``kernels`` of ``models`` says of which functions); and CUDA's fused normalisation.

Not covered: scratch of NPU kernels; what the compiler would rather compute again than keep.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdptoys.models.kernels import Pairs

_library = torch.library.Library("planned", "DEF")
_library.define("rms_norm(Tensor input, Tensor? weight, float? eps) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)")
_library.define("npu_fusion_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)")
_library.define(
    "npu_fusion_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor maximum, "
    "Tensor sum) -> (Tensor, Tensor, Tensor)"
)
_library.define("grouped_mm(Tensor left, Tensor right, Tensor offs) -> Tensor")
_library.define("rotary(Tensor input, Tensor cos, Tensor sin) -> Tensor")
_library.define("npu_swiglu(Tensor input) -> Tensor")
_library.define("npu_swiglu_backward(Tensor grad, Tensor input) -> Tensor")
_library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
_library.define(
    "low_bit_adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) codes, Tensor(c!) scales, Tensor(d!) more_codes, "
    "Tensor(e!) more_scales, Tensor(f!) copies) -> ()"
)
_library.define("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")


def _shape(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what an operator of ours returns."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, "Meta")
        return function

    return register


@_shape("rms_norm")
def _rms_norm(input: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty((*input.shape[:-1], 1), dtype=torch.float32),
    )


@_shape("rms_norm_backward")
def _rms_norm_backward(grad: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    return grad_input, torch.empty_like(weight) if weight is not None else grad.new_empty(0)


@_shape("npu_fusion_attention")
def _npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    statistics = [query.new_empty((*query.shape[:3], 8), dtype=torch.float32) for _ in range(2)]
    return query.new_empty(query.shape), statistics[0], statistics[1]


@_shape("npu_fusion_attention_backward")
def _npu_fusion_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, maximum: Tensor, sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@_shape("grouped_mm")
def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.ndim == 3 else (len(offs),)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


@_shape("low_bit_adamw_")
def _low_bit_adamw(*tensors: Tensor) -> None: ...


@_shape("rotary")
def _rotary(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return input.new_empty(input.shape)


@_shape("npu_swiglu")
def _npu_swiglu(input: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


@_shape("npu_swiglu_backward")
def _npu_swiglu_backward(grad: Tensor, input: Tensor) -> Tensor:
    return input.new_empty(input.shape)


@_shape("swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_shape("swiglu_backward")
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


class _RMSNorm(torch.autograd.Function):
    """Fused normalisation, which keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        output, rstd = torch.ops.planned.rms_norm(input, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        grad_input, grad_weight = torch.ops.planned.rms_norm_backward(grads[0], input, rstd, weight)
        return grad_input, None if weight is None else grad_weight, None


class _NPUAttention(torch.autograd.Function):
    """torch_npu's fused attention, which keeps its inputs, its result, and two statistics a row, eight times each.

    Results and gradients are contiguous, whatever the inputs are.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        results = torch.ops.planned.npu_fusion_attention(query, key, value)
        ctx.save_for_backward(mask, query, key, value, *results)
        output: Tensor = results[0]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        made: tuple[Tensor, Tensor, Tensor] = torch.ops.planned.npu_fusion_attention_backward(
            grads[0], *ctx.saved_tensors[1:]
        )
        return *made, None


class _NPUSwiGLU(torch.autograd.Function):
    """torch_npu's gate, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(input)
        output: Tensor = torch.ops.planned.npu_swiglu(input)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.ops.planned.npu_swiglu_backward(grads[0], *ctx.saved_tensors), None


class _SwiGLU(torch.autograd.Function):
    """A compiled gate, which keeps its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        output: Tensor = torch.ops.planned.swiglu(gate, up)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = torch.ops.planned.swiglu_backward(grads[0], *ctx.saved_tensors)
        return made


class _Rotary(torch.autograd.Function):
    """A compiled rotation, which keeps the tables."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(cos, sin)
        output: Tensor = torch.ops.planned.rotary(input, cos, sin)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.planned.rotary(grads[0], *ctx.saved_tensors), None, None, None


def low_bit_adamw(param: Tensor, grad: Tensor, step: Tensor, mean: Any, square: Any, *_: Any) -> None:
    """A compiled update of states of few bits; on a CPU the compiler keeps float32 copies of both means meanwhile."""
    copies = param.new_empty((2, *param.shape))
    torch.ops.planned.low_bit_adamw_(param, grad, mean.codes, mean.scale, square.codes, square.scale, copies)


rms_norm: Callable[..., Tensor] = _RMSNorm.apply
npu_attention: Callable[..., Tensor] = _NPUAttention.apply


def _attend(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, atten_mask: Tensor, **_: Any
) -> tuple[Tensor]:
    return (npu_attention(query, key, value, atten_mask),)


def _multiply(left: list[Tensor], right: list[Tensor], *, group_list: Tensor, **_: Any) -> list[Tensor]:
    return [torch.ops.planned.grouped_mm(left[0], right[0], group_list)]


NPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": _attend,
    "npu_rms_norm": lambda input, gamma, epsilon: (rms_norm(input, gamma, epsilon),),
    "npu_rotary_mul": lambda input, cos, sin, mode: torch.ops.planned.rotary(input, cos, sin),
    "npu_swiglu": _NPUSwiGLU.apply,
    "npu_grouped_matmul": _multiply,
}
"""torch_npu's operator → what stands for it."""

COMPILED: dict[str, Callable[..., Tensor]] = {
    "rms_norm": rms_norm,
    "rotary": _Rotary.apply,
    "swiglu": _SwiGLU.apply,
}
"""Operation → what stands for its compiled implementation."""
