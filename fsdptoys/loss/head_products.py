"""The three matmuls of a linear head for one chunk of tokens: logits, gradients of hidden states
and of the weight.

The gradient of the weight is summed over chunks in its own dtype. cuBLAS adds a bf16 product to a
float32 sum within the matmul. Elsewhere the product of some classes at a time goes through a small
buffer in the inputs' dtype, so that no second tensor of the weight's size is made; each chunk's
share is then rounded once more than on CUDA.

On CPUs all matmuls go over some classes at a time, by the fastest implementation of
``models.grouped``: oneDNN's float32 matmul returns fresh tensors, which should stay small.

Shapes: C tokens of a chunk, D width, V vocabulary, B classes at a time.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fsdptoys.models.grouped import Segment, choose_product

BLOCK_CLASSES = 2048
"""Classes multiplied at a time. CPU matmuls were equally fast between 512 and 4096."""


def choose_products(hidden_ND: Tensor, weight_VD: Tensor) -> "DeviceProducts":
    """The matmuls for the device and dtype of these tensors."""
    if hidden_ND.device.type == "cpu":
        return CPUProducts(hidden_ND.dtype, *weight_VD.shape)
    return DeviceProducts()


class DeviceProducts:
    """One matmul each."""

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor, out_CV: Tensor) -> None:
        """``hidden @ weight.T``."""
        torch.mm(hidden_CD, weight_VD.t(), out=out_CV)

    def hidden_gradient(
        self, gradient_CV: Tensor, weight_VD: Tensor, out_CD: Tensor
    ) -> None:
        """``gradient @ weight``."""
        torch.mm(gradient_CV, weight_VD, out=out_CD)

    def weight_gradient(
        self, gradient_CV: Tensor, hidden_CD: Tensor, sum_VD: Tensor, first: bool
    ) -> None:
        """Add ``gradient.T @ hidden`` to the sum; the first chunk overwrites it."""
        beta = 0 if first else 1
        if sum_VD.dtype == hidden_CD.dtype:
            sum_VD.addmm_(gradient_CV.t(), hidden_CD, beta=beta)
        elif (
            sum_VD.dtype == torch.float32
            and sum_VD.is_cuda
            and type(sum_VD) is Tensor
            and _adds_to_float32()
        ):
            torch.addmm(
                sum_VD,
                gradient_CV.t(),
                hidden_CD,
                out_dtype=torch.float32,
                beta=beta,
                out=sum_VD,
            )
        else:
            _add_by_blocks(
                lambda gradient_CB: gradient_CB.t() @ hidden_CD,
                gradient_CV,
                sum_VD,
                first,
            )


class CPUProducts(DeviceProducts):
    """Matmuls over some classes at a time."""

    def __init__(self, dtype: torch.dtype, *widths: int) -> None:
        self.product = choose_product("cpu", dtype, *widths)

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor, out_CV: Tensor) -> None:
        """``hidden @ weight.T``."""
        piece = _piece(hidden_CD)
        for weight_BD, out_CB in zip(
            weight_VD.split(BLOCK_CLASSES),
            out_CV.split(BLOCK_CLASSES, dim=1),
            strict=True,
        ):
            self.product.linear(hidden_CD, weight_BD, piece, out_CB)

    def hidden_gradient(
        self, gradient_CV: Tensor, weight_VD: Tensor, out_CD: Tensor
    ) -> None:
        """``gradient @ weight``."""
        self.product.linear(gradient_CV, weight_VD.t(), _piece(gradient_CV), out_CD)

    def weight_gradient(
        self, gradient_CV: Tensor, hidden_CD: Tensor, sum_VD: Tensor, first: bool
    ) -> None:
        """Add ``gradient.T @ hidden`` to the sum."""
        outer = self.product.outer
        _add_by_blocks(
            lambda grad_CB: outer(grad_CB, hidden_CD, _piece(hidden_CD), None),
            gradient_CV,
            sum_VD,
            first,
        )


def _add_by_blocks(
    product: Callable[[Tensor], Tensor],
    gradient_CV: Tensor,
    sum_VD: Tensor,
    first: bool,
) -> None:
    """Add the product of some classes' gradients to their part of the sum; the first chunk
    overwrites it."""
    for gradient_CB, sum_BD in zip(
        gradient_CV.split(BLOCK_CLASSES, dim=1),
        sum_VD.split(BLOCK_CLASSES),
        strict=True,
    ):
        share_BD = product(gradient_CB)
        _ = sum_BD.copy_(share_BD) if first else sum_BD.add_(share_BD)


@functools.cache
def _adds_to_float32() -> bool:
    """Whether ``torch.addmm`` takes bf16 operands and a float32 sum on CUDA; tried once per
    process.

    Expected from 2.10 (https://github.com/pytorch/pytorch/pull/167931); 2.8 has ``out_dtype`` but
    refuses such a sum.
    """
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    total = torch.full((16, 16), float("nan"), device="cuda")
    try:
        for beta in (0, 1):
            torch.addmm(
                total, ones.t(), ones, out_dtype=torch.float32, beta=beta, out=total
            )
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 32).all())


def _piece(rows_CD: Tensor) -> Segment:
    return Segment(
        experts=0, start=0, length=len(rows_CD), padded=len(rows_CD), ends_E=None
    )
