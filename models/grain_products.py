"""Products, and sums over tokens, of many grains in few calls, with the bits of one grain at a time (``grains``).

A small model spends its time in calls rather than in arithmetic. So the products of all grains are one ``bmm`` where
they are small, on one CPU thread and with every grain's rows aligned: it multiplies its matrices one by one, each as if
alone. Otherwise each grain is a call. Which of the two follows from the widths and the grain alone. A ``bmm`` of 16-bit
operands is one of float32, where their products are exact, and its result is rounded.

Elementwise kernels get as many grains as end where a vectorized loop does, up to the size that PyTorch leaves to one
thread.

Shapes: N rows, G grains, M rows of a grain, I and O inner and outer width of a matmul, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .grain_attention import ALIGNMENT, GRADIENTS, aligned, on_grid, split_rows
from .linear import goes_through_float32, linear

JOINED_ELEMENTS = 2**15
"""Elements of a weight up to which products of grains are one call."""
BLOCK_ELEMENTS = 2**15
"""Elements of a gradient that are added over all grains at a time, so that the float64 sum stays in cache."""
BLOCK_WIDTH = 1024
"""Columns of a product at a time: wider ones are slower where they have the few rows of a grain."""
CALL_ELEMENTS = 2**15
"""Elements of a call that takes several grains; PyTorch splits larger ones over threads."""
LANES = 64
"""Elements of a vectorized loop's turn, at most: none is left over where they divide a grain."""


def chunk_rows(rows: int, grain: int, width: int) -> Iterator[slice]:
    """Rows of whole grains, at whose borders a vectorized loop over all their elements leaves none to its tail."""
    elements = grain * width
    grains = 1 if elements % LANES else max(1, CALL_ELEMENTS // elements)
    return split_rows(rows, grains * grain)


def multiply(input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, grain: int) -> Tensor:
    """``torch.nn.functional.linear`` of each grain, in the dtype of all."""
    N, (O, I) = len(input_NI), weight_OI.shape  # noqa: E741
    if joins(input_NI, grain, O, I):
        input_GMI = aligned(input_NI).float().view(-1, grain, I)
        out_NO = torch.bmm(input_GMI, weight_OI.float().t().expand(len(input_GMI), I, O)).view(N, O)
        return (out_NO if bias_O is None else out_NO.add_(bias_O)).to(input_NI.dtype)
    out_NO = input_NI.new_empty(N, O)
    for rows in split_rows(N, grain):
        input_MI = aligned(input_NI[rows])
        if bias_O is not None or goes_through_float32(input_MI):
            out_NO[rows] = linear(input_MI, weight_OI, bias_O)
            continue
        for start in range(0, O, BLOCK_WIDTH):
            block = slice(start, start + BLOCK_WIDTH)
            torch.mm(input_MI, weight_OI[block].t(), out=out_NO[rows, block])
    return out_NO


def joins(tensor: Tensor, grain: int, *widths: int) -> bool:
    """Whether small products of all grains of rows may be one call."""
    return (
        tensor.device.type == "cpu"
        and torch.get_num_threads() == 1
        and len(tensor) % grain == 0
        and widths[0] * widths[1] <= JOINED_ELEMENTS
        and not any(grain * width * 4 % ALIGNMENT for width in widths)
    )


def add_weight_gradient(
    total_OI: Tensor, grad_NO: Tensor, input_NI: Tensor, grain: int, dtype: torch.dtype | None = None
) -> None:
    """Add ``grad.T @ input`` of each grain, rounded to ``dtype`` (None for theirs), to a float64 sum."""
    (N, O), I = grad_NO.shape, input_NI.shape[1]  # noqa: E741
    if not joins(grad_NO, grain, O, I):
        grains = list(split_rows(N, grain))
        _add_products(total_OI, *([aligned(each[rows]) for rows in grains] for each in (grad_NO, input_NI)))
        return
    for rows in split_rows(N, grain * max(1, BLOCK_ELEMENTS // (O * I))):
        grad_GMO, input_GMI = (aligned(x[rows]).float().view(-1, grain, x.shape[1]) for x in (grad_NO, input_NI))
        products_GOI = torch.bmm(grad_GMO.transpose(1, 2), input_GMI).to(dtype or grad_NO.dtype)
        total_OI += on_grid(products_GOI, GRADIENTS).sum(0)


def _add_products(total_OI: Tensor, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """The parts are rounded as by ``on_grid``, in fewer passes.

    A grain's part comes with the shift, and the next one's with its negative, so that the sum passes between 0 and the
    shift. It is exact while it is below 2.
    """
    O, I = total_OI.shape  # noqa: E741
    rows = max(16, BLOCK_ELEMENTS // I // 16 * 16)
    wide = total_OI.new_empty(min(rows, O), I)
    for start in range(0, O, rows):
        block = slice(start, start + rows)
        total_BI = total_OI[block]
        wide_BI, shift = wide[: len(total_BI)], GRADIENTS
        for grad_MO, input_MI in zip(grads, inputs, strict=True):
            total_BI += wide_BI.copy_(linear(grad_MO[:, block].t(), input_MI.t())).add_(shift)
            shift = -shift
        if shift < 0:
            total_BI -= GRADIENTS


def sum_rows(rows_ND: Tensor, grain: int) -> Tensor:
    """The float64 sum of rows that are first added within each grain, in their dtype."""
    total_D = rows_ND.new_zeros(rows_ND.shape[1], dtype=torch.float64)
    for rows in split_rows(len(rows_ND), grain * max(1, CALL_ELEMENTS // (grain * rows_ND.shape[1]))):
        total_D += on_grid(sum_grains(rows_ND[rows], grain), GRADIENTS).sum(0)
    return total_D


def sum_grains(rows_ND: Tensor, grain: int) -> Tensor:
    """The sum of each grain's rows, (G, D)."""
    whole = len(rows_ND) // grain * grain
    sums_GD = rows_ND[:whole].view(-1, grain, rows_ND.shape[1]).sum(1)
    return sums_GD if whole == len(rows_ND) else torch.cat([sums_GD, rows_ND[whole:].sum(0, keepdim=True)])


class Elementwise(torch.autograd.Function):
    """An elementwise function of rows, recomputed in the backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], grain: int, *inputs: Tensor) -> Tensor:
        """Some whole grains at a time."""
        ctx.save_for_backward(*inputs)
        ctx.settings = function, grain
        out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        for rows in chunk_rows(len(out), grain, out.shape[1]):
            out[rows] = function(*(aligned(each[rows]) for each in inputs))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of the inputs."""
        (function, grain), inputs = ctx.settings, ctx.saved_tensors
        grads = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs]
        for rows in chunk_rows(len(grad), grain, grad.shape[1]):
            leaves = [aligned(each[rows]).detach().requires_grad_() for each in inputs]
            with torch.enable_grad():
                piece = function(*leaves)
            found = torch.autograd.grad(piece, leaves, aligned(grad[rows]))
            for whole, part in zip(grads, found, strict=True):
                whole[rows] = part
        return None, None, *grads
