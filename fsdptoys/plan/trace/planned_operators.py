"""Stand-ins for fused kernels: operators of the shapes of their results, and functions that keep
the tensors of the backward.

torch_npu's kernels have its names and signatures, so that ``models.npu_kernels`` runs unchanged;
functions that ``torch.compile`` fuses are assumed to read their inputs once and to keep these
rather than intermediate results.
Source: torch_npu's ``npu_fusion_attention`` (github.com/Ascend/op-plugin,
``scaled_dot_product_attention``).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdptoys.models.rotations import Pairs

_library = torch.library.Library("planned", "DEF")


def _alike(*like: int) -> Callable[..., Any]:
    """Results with the shapes of the arguments at these places."""
    return lambda *tensors: tuple(tensors[i].new_empty(tensors[i].shape) for i in like)


def _rms_norm(
    input: Tensor, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)


def _rms_norm_backward(
    grad: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    return grad_input, torch.empty_like(
        weight
    ) if weight is not None else grad.new_empty(0)


def _npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = [
        query.new_empty((*query.shape[:3], 8), dtype=torch.float32) for _ in range(2)
    ]
    return query.new_empty(query.shape), statistics[0], statistics[1]


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.ndim == 3 else (len(offs),)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


SHAPES: dict[str, Callable[..., Any]] = {
    "rms_norm(Tensor input, Tensor? weight, float? eps) -> (Tensor, Tensor)": _rms_norm,
    (
        "rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, "
        "Tensor)"
    ): _rms_norm_backward,
    (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)"
    ): _npu_fusion_attention,
    (
        "npu_fusion_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor "
        "output, Tensor maximum, Tensor sum) -> (Tensor, Tensor, Tensor)"
    ): _alike(1, 2, 3),
    "grouped_mm(Tensor left, Tensor right, Tensor offs) -> Tensor": _grouped_mm,
    "rotary(Tensor input, Tensor cos, Tensor sin) -> Tensor": lambda input, *_: (
        torch.empty_like(input)
    ),
    "npu_swiglu(Tensor input) -> Tensor": lambda x: x.new_empty(
        (*x.shape[:-1], x.shape[-1] // 2)
    ),
    "npu_swiglu_backward(Tensor grad, Tensor input) -> Tensor": lambda _, input: (
        input.new_empty(input.shape)
    ),
    "swiglu(Tensor gate, Tensor up) -> Tensor": lambda gate, _: gate.new_empty(
        gate.shape
    ),
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)": _alike(
        1, 2
    ),
    (
        "low_bit_adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) codes, Tensor(c!) scales, "
        "Tensor(d!) more_codes, Tensor(e!) more_scales, Tensor(f!) copies) -> ()"
    ): lambda *_: None,
    "softmax_gradient_(Tensor(a!) logits, Tensor labels, Tensor(b!) losses) -> ()": lambda *_: (
        None
    ),
    "addmm_to_float32_(Tensor(a!) sum, Tensor left, Tensor right) -> ()": lambda *_: (
        None
    ),
}
"""Schema of an operator → the function that makes its results."""
for _schema, _shape in SHAPES.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _shape, "Meta")


class _RMSNorm(torch.autograd.Function):
    """Fused normalization; keeps its input and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, eps: float | None
    ) -> Tensor:
        output, rstd = torch.ops.planned.rms_norm(input, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        grad_input, grad_weight = torch.ops.planned.rms_norm_backward(
            grads[0], input, rstd, weight
        )
        return grad_input, None if weight is None else grad_weight, None


class _NPUAttention(torch.autograd.Function):
    """torch_npu's fused attention; keeps its inputs, its result, and two statistics per row, eight
    times each.

    Results and gradients are contiguous for any inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        results = torch.ops.planned.npu_fusion_attention(query, key, value)
        ctx.save_for_backward(mask, query, key, value, *results)
        output: Tensor = results[0]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = torch.ops.planned.npu_fusion_attention_backward(
            grads[0], *ctx.saved_tensors[1:]
        )
        return query, key, value, None


class _KeepsInputs(torch.autograd.Function):
    """An operator that keeps its inputs for ``NAME_backward``, such as torch_npu's and the compiled
    SwiGLU."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(*tensors)
        output: Tensor = getattr(torch.ops.planned, name)(*tensors)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = getattr(torch.ops.planned, f"{ctx.name}_backward")(
            grads[0], *ctx.saved_tensors
        )
        return None, *([gradients] if isinstance(gradients, Tensor) else gradients)


class _GroupedMatmul(torch.autograd.Function):
    """A grouped matmul, whose gradients are grouped matmuls as well; keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, offs)
        output: Tensor = torch.ops.planned.grouped_mm(left, right, offs)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right, offs = ctx.saved_tensors
        multiply = torch.ops.planned.grouped_mm
        grad_left = multiply(grads[0], right.mT, offs)
        return grad_left, multiply(left.t(), grads[0], offs), None


class _Rotary(torch.autograd.Function):
    """A compiled rotation; keeps the tables."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        output: Tensor = torch.ops.planned.rotary(input, cos, sin)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.planned.rotary(grads[0], *ctx.saved_tensors), None, None, None


def update_low_bit(
    param: Tensor, grad: Tensor, step: Tensor, mean: Any, square: Any, *_: Any
) -> None:
    """A compiled update of low-bit states; on a CPU the compiler makes float32 copies of both
    moments."""
    copies = param.new_empty((2, *param.shape))
    torch.ops.planned.low_bit_adamw_(
        param, grad, mean.codes, mean.scale, square.codes, square.scale, copies
    )


rms_norm: Callable[..., Tensor] = _RMSNorm.apply
grouped_matmul: Callable[[Tensor, Tensor, Tensor], Tensor] = _GroupedMatmul.apply
npu_attention: Callable[..., Tensor] = _NPUAttention.apply


NPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": lambda query, key, value, *_, atten_mask, **__: (
        npu_attention(query, key, value, atten_mask),
    ),
    "npu_rms_norm": lambda input, gamma, epsilon: (rms_norm(input, gamma, epsilon),),
    "npu_rotary_mul": lambda input, cos, sin, mode: torch.ops.planned.rotary(
        input, cos, sin
    ),
    "npu_swiglu": lambda input, dim: _KeepsInputs.apply("npu_swiglu", input),
    "npu_grouped_matmul": lambda left, right, *, group_list, **_: [
        torch.ops.planned.grouped_mm(left[0], right[0], group_list)
    ],
}
"""torch_npu's operator → its stand-in."""

COMPILED: dict[str, Callable[..., Tensor]] = {
    "rms_norm": rms_norm,
    "rotary": _Rotary.apply,
    "swiglu": functools.partial(_KeepsInputs.apply, "swiglu"),
}
"""Operation → the stand-in for its compiled implementation."""
