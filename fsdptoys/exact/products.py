"""Products, and sums over tokens, of many grains in few calls, with the bits of one grain at a time
(``exact.ops``).

A small model spends its time in calls rather than in arithmetic. So the products of all grains are
one ``bmm`` where they are small, on one CPU thread and with every grain's rows aligned: it
multiplies its matrices one by one, each as if alone. Otherwise each grain is a call. Which of the
two follows from the widths and the grain alone. A ``bmm`` of 16-bit operands is one of float32,
where their products are exact, and its result is rounded.

Elementwise kernels get as many grains as end where a vectorized loop does, up to the size that
PyTorch leaves to one thread.

On accelerators calls are as large as memory allows (``DEVICE_BLOCKS``), since launches take most of
the time. Only matmuls and reductions are calls of one grain: the order of their sums depends on the
shape.

Shapes: N rows, G grains, M rows of a grain, I and O inner and outer width of a matmul, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.linear import goes_through_float32, linear

from .attention import ALIGNMENT, GRADIENTS, aligned, on_grid, split_rows

JOINED_ELEMENTS = 2**15
"""Elements of a weight up to which products of grains are one call."""
LANES = 64
"""Elements of a vectorized loop's turn, at most: none is left over where they divide a grain."""


class Blocks(NamedTuple):
    """Sizes of a call on one type of device."""

    call_elements: int
    """Maximum of an elementwise call over several grains."""
    gradient_elements: int
    """Maximum of a weight's gradient that is summed over all grains at a time, in float64."""
    product_columns: int
    """Maximum of a matmul of one grain."""
    compared_tokens: int
    """Maximum of a call that compares ids of tokens with each other."""
    joins_reductions: bool
    """Whether a reduction of rows takes several grains; otherwise each call has the rows of one
    grain."""
    mixes_dtypes: bool
    """Whether an operator on two dtypes is as fast as on one."""


CPU_BLOCKS = Blocks(
    call_elements=2**15,  # PyTorch splits larger calls over threads
    gradient_elements=2**15,  # stay in cache in float64
    product_columns=1024,  # wider matmuls with the few rows of a grain are slower
    compared_tokens=2**15,
    joins_reductions=True,  # the order of a row's sum does not depend on the number of rows
    mixes_dtypes=False,  # loops over two dtypes are not vectorized
)
DEVICE_BLOCKS = Blocks(
    call_elements=2**28,  # 1 GiB of float32
    gradient_elements=2**26,  # 512 MiB of float64
    product_columns=2**62,
    compared_tokens=2**12,  # 128 MiB of int64
    joins_reductions=False,  # the number of rows decides how many threads add one
    mixes_dtypes=True,
)


def blocks_of(tensor: Tensor) -> Blocks:
    """Sizes for the device of a tensor."""
    return CPU_BLOCKS if tensor.device.type == "cpu" else DEVICE_BLOCKS


def chunk_rows(tensor_ND: Tensor, grain: int) -> Iterator[slice]:
    """Rows of whole grains, at whose borders a vectorized loop over all their elements leaves none
    to its tail."""
    elements = grain * tensor_ND.shape[1]
    grains = (
        1
        if elements % LANES
        else max(1, blocks_of(tensor_ND).call_elements // elements)
    )
    return split_rows(len(tensor_ND), grains * grain)


def reduce_rows(
    reduction: Callable[[Tensor], Tensor], rows_ND: Tensor, grain: int
) -> Tensor:
    """Apply a reduction over the last dim to rows (N, D), whole or one grain at a time; return (N,
    …)."""
    if blocks_of(rows_ND).joins_reductions or len(rows_ND) <= grain:
        return reduction(rows_ND)
    return torch.cat(
        [reduction(rows_ND[rows]) for rows in split_rows(len(rows_ND), grain)]
    )


def multiply(
    input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, grain: int
) -> Tensor:
    """``torch.nn.functional.linear`` of each grain, in the dtype of all."""
    N = len(input_NI)
    O, I = weight_OI.shape  # noqa: E741
    if joins(input_NI, grain, O, I):
        input_GMI = aligned(input_NI).float().view(-1, grain, I)
        out_NO = torch.bmm(
            input_GMI, weight_OI.float().t().expand(len(input_GMI), I, O)
        ).view(N, O)
        return (out_NO if bias_O is None else out_NO.add_(bias_O)).to(input_NI.dtype)
    out_NO = input_NI.new_empty(N, O)
    width = blocks_of(input_NI).product_columns
    # For all grains alike: a product into rows that begin elsewhere may round otherwise.
    direct = bias_O is None and grain * O * input_NI.element_size() % ALIGNMENT == 0
    for rows in split_rows(N, grain):
        input_MI = aligned(input_NI[rows])
        if not direct or goes_through_float32(input_MI):
            out_NO[rows] = linear(input_MI, weight_OI, bias_O)
            continue
        for start in range(0, O, width):
            block = slice(start, start + width)
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
    total_OI: Tensor,
    grad_NO: Tensor,
    input_NI: Tensor,
    grain: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Add ``grad.T @ input`` of each grain, rounded to ``dtype`` (None for theirs), to a float64
    sum."""
    N, width = grad_NO.shape
    inner_width = input_NI.shape[1]
    if not joins(grad_NO, grain, width, inner_width):
        grains = list(split_rows(N, grain))
        _add_products(
            total_OI,
            *([aligned(x[rows]) for rows in grains] for x in (grad_NO, input_NI)),
        )
        return
    for rows in split_rows(
        N, grain * max(1, blocks_of(grad_NO).gradient_elements // (width * inner_width))
    ):
        grad_GMO, input_GMI = (
            aligned(x[rows]).float().view(-1, grain, x.shape[1])
            for x in (grad_NO, input_NI)
        )
        products_GOI = torch.bmm(grad_GMO.transpose(1, 2), input_GMI).to(
            dtype or grad_NO.dtype
        )
        total_OI += on_grid(products_GOI, GRADIENTS).sum(0)


def _add_products(
    total_OI: Tensor, grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """The parts are rounded as by ``on_grid``, in fewer passes.

    A grain's part comes with the shift, and the next one's with its negative, so that the sum
    passes between 0 and the shift. It is exact while it is below 2.
    """
    O, I = total_OI.shape  # noqa: E741
    blocks = blocks_of(total_OI)
    rows = max(16, blocks.gradient_elements // I // 16 * 16)
    wide = total_OI.new_empty(min(rows, O), I)
    shifts = {
        shift: total_OI.new_full((1,), shift)
        for shift in (GRADIENTS, -GRADIENTS)
        if blocks.mixes_dtypes
    }
    for start in range(0, O, rows):
        block = slice(start, start + rows)
        total_BI = total_OI[block]
        wide_BI = wide[: len(total_BI)]
        shift = GRADIENTS
        for grad_MO, input_MI in zip(grads, inputs, strict=True):
            product_BI = linear(grad_MO[:, block].t(), input_MI.t())
            # one launch, and 12 bytes an element in place of 28
            if blocks.mixes_dtypes:
                torch.add(product_BI, shifts[shift], out=wide_BI)
            else:
                wide_BI.copy_(product_BI).add_(shift)
            total_BI += wide_BI
            shift = -shift
        if shift < 0:
            total_BI -= GRADIENTS


def sum_rows(rows_ND: Tensor, grain: int) -> Tensor:
    """The float64 sum of rows that are first added within each grain, in their dtype."""
    total_D = rows_ND.new_zeros(rows_ND.shape[1], dtype=torch.float64)
    for rows in split_rows(
        len(rows_ND),
        grain * max(1, blocks_of(rows_ND).call_elements // (grain * rows_ND.shape[1])),
    ):
        total_D += on_grid(sum_grains(rows_ND[rows], grain), GRADIENTS).sum(0)
    return total_D


def sum_grains(rows_ND: Tensor, grain: int) -> Tensor:
    """The sum of each grain's rows, (G, D)."""
    if not blocks_of(rows_ND).joins_reductions:
        return torch.stack(
            [rows_ND[rows].sum(0) for rows in split_rows(len(rows_ND), grain)]
        )
    whole = len(rows_ND) // grain * grain
    sums_GD = rows_ND[:whole].view(-1, grain, rows_ND.shape[1]).sum(1)
    return (
        sums_GD
        if whole == len(rows_ND)
        else torch.cat([sums_GD, rows_ND[whole:].sum(0, keepdim=True)])
    )


class Elementwise(torch.autograd.Function):
    """An elementwise function of rows, recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], grain: int, *inputs: Tensor
    ) -> Tensor:
        """Some whole grains at a time."""
        ctx.save_for_backward(*inputs)
        ctx.settings = function, grain
        out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        for rows in chunk_rows(out, grain):
            out[rows] = function(*(aligned(input[rows]) for input in inputs))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of the inputs."""
        function, grain = ctx.settings
        inputs = ctx.saved_tensors
        grads = [
            torch.empty_like(input, memory_format=torch.contiguous_format)
            for input in inputs
        ]
        for rows in chunk_rows(grad, grain):
            leaves = [
                aligned(input[rows]).detach().requires_grad_() for input in inputs
            ]
            with torch.enable_grad():
                piece = function(*leaves)
            piece_grads = torch.autograd.grad(piece, leaves, aligned(grad[rows]))
            for whole, part in zip(grads, piece_grads, strict=True):
                whole[rows] = part
        return None, None, *grads
