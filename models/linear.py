"""Matmuls of linear layers, of bf16 and float16 on CPUs without instructions for them.

There torch's own matmul is a loop without vectors: in bf16 on an AVX2 machine 1 to 23 GFLOP/s where
float32 has 60 to 85; in float16 0.8 to 6 where float32 has 28 to 32 (one core of an AMD EPYC with
AVX512-BF16, torch 2.13.0). So operands are cast to float32 and multiplied, and the result is
rounded, in forward and backward: the same exact products and float32 sums, added in another order.
The price is a float32 copy of both operands during the matmul; tensors saved for the backward keep
16 bits.

Compiled blocks are left to the compiler, and tensor subclasses (fake tensors, say) to torch.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def linear(
    input: Tensor, weight_OI: Tensor | None, bias_O: Tensor | None = None
) -> Tensor:
    """``torch.nn.functional.linear``, through float32 where faster.

    Without a weight it returns the input: a loss of a model that makes logits itself.
    """
    if weight_OI is None:
        return input if bias_O is None else input + bias_O
    if not goes_through_float32(input):
        return F.linear(input, weight_OI, bias_O)
    product: Tensor = _Float32Product.apply(input, weight_OI)
    return product if bias_O is None else product + bias_O


def goes_through_float32(tensor: Tensor) -> bool:
    """Whether matmuls of an operand go through float32."""
    return (
        tensor.dtype in ONEDNN_HAS
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)
        and lacks_matmul(tensor.dtype)
    )


ONEDNN_HAS = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""dtype → torch's function that reports whether oneDNN multiplies it on this CPU."""


@functools.cache
def lacks_matmul(dtype: torch.dtype) -> bool:
    """Whether oneDNN has no matmul of a 16-bit dtype for this CPU; False if torch cannot say."""
    supported = getattr(torch.ops.mkldnn, ONEDNN_HAS[dtype], None)
    return supported is not None and not supported()


class _Float32Product(torch.autograd.Function):
    """``input @ weight.T`` of 16-bit operands, multiplied in float32."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight_OI)
        return F.linear(input.float(), weight_OI.float()).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, weight_OI = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2).float()
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = (
                (gradient_NO @ weight_OI.float()).to(input.dtype).view(input.shape)
            )
        if ctx.needs_input_grad[1]:
            of_weight = (gradient_NO.t() @ input.flatten(0, -2).float()).to(
                weight_OI.dtype
            )
        return of_input, of_weight
