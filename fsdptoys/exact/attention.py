"""Attention with the same bits under every layout (``exact.ops``).

Queries attend grain by grain: the rows of one grain over the keys up to its last token. Each head
of a sequence is an entry of a batch of its own, with the strides and the alignment that it has in
every other batch. Gradients of keys and values are added over grains, and over the query heads that
share them, in float64. So ranks that share a sequence may have its heads, or some of its grains.
The price: a kernel call for each grain, and masks.

Keys and values may be float64, and their gradients are then float64 too: that is how ranks exchange
them (``Float64Context``).

Shapes: B batch, T sequence, P queries, S keys, M queries of a grain, H query heads, G key/value
heads, K width of a head.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.attention_rows import last_rows
from fsdptoys.models.context import Wrapped
from fsdptoys.models.kernels import DocumentAttention
from fsdptoys.models.ops import Ops

ALIGNMENT = 64
"""Bytes: matmuls may round by the alignment of their operands, and on accelerators choose kernels
by it."""
GRADIENTS = 6.0
"""Parts of gradients of weights become multiples of 2⁻⁵⁰; sums below 8 are exact."""
ACTIVATIONS = 6.0 * 2**-10
"""Parts of gradients of keys and values, which are smaller, become multiples of 2⁻⁶⁰; sums below
2⁻⁷ are exact."""

MaskedKernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``kernel(q_BHTK, k_BGSK, v_BGSK, mask)`` with an additive mask."""


def split_rows(rows: int, grain: int) -> Iterator[slice]:
    """The rows of each grain; a last one may be shorter."""
    return (slice(start, min(start + grain, rows)) for start in range(0, rows, grain))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its rows do not lie like those of a new tensor."""
    tensor = tensor.contiguous()
    return (
        tensor.clone() if tensor.numel() and tensor.data_ptr() % ALIGNMENT else tensor
    )


def on_grid(part: Tensor, shift: float) -> Tensor:
    """A part of a sum in float64, rounded to a multiple of a power of two, at the cost of two
    passes over it.

    Sums of such parts are exact, so their order does not matter. Without it a sum in float64 loses
    the bits of a part below 2⁻⁵³ of the sum, and in some orders they decide the rounding to
    float32, where the rest is a tie: frequent where parts have the few bits of bfloat16.

    Args:
        part: larger absolute values than a third of ``shift`` are rounded more coarsely.
        shift: ``GRADIENTS`` or ``ACTIVATIONS``, 1.5 times a power of two; the multiples are those
            of 2⁻⁵² of it.
    """
    return part.to(torch.float64, copy=True).add_(shift).sub_(shift)


def attention_kernels(ops: Ops, grain: int, dtype: torch.dtype) -> dict[str, Any]:
    """The attentions of a table, grain by grain in ``dtype``, for a table of kernels."""
    documents = ops.document_attention

    def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        return attend_grains(
            documents.attend, q_BHTK, k_BGTK, v_BGTK, None, grain, dtype
        )

    def attend_documents(
        q_BHPK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor
    ) -> Tensor:
        if mask.ndim == 2 or len(mask) == 1:
            return attend_grains(
                documents.attend, q_BHPK, k_BGSK, v_BGSK, mask, grain, dtype
            )
        sequences = zip(
            *(x.split(1) for x in (q_BHPK, k_BGSK, v_BGSK, mask)), strict=True
        )
        return torch.cat(
            [
                attend_grains(documents.attend, q, k, v, rows, grain, dtype)
                for q, k, v, rows in sequences
            ]
        )

    return {
        "attention": attend,
        "document_attention": DocumentAttention(documents.mask, attend_documents),
    }


def attend_grains(
    kernel: MaskedKernel,
    q_BHPK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask_PS: Tensor | None,
    grain: int,
    dtype: torch.dtype,
) -> Tensor:
    """The last P rows of attention over S keys, in the dtype of the queries.

    Args:
        kernel: attends with a mask.
        q_BHPK: queries; the first one begins a grain.
        k_BGSK: keys up to the last query.
        v_BGSK: values.
        seen_PS: additive mask, of any leading dims of 1; None for causal attention.
        grain: tokens of a grain.
        dtype: of the computation.
    """
    B, H, P, K = q_BHPK.shape
    S = k_BGSK.shape[2]
    share = H // k_BGSK.shape[1]
    starts = range(0, P, grain)
    sizes = tuple(min(grain, P - start) for start in starts)
    ends = tuple(
        S - P + start + size for start, size in zip(starts, sizes, strict=True)
    )
    queries = q_BHPK.to(dtype).reshape(B * H, 1, P, K).contiguous().split(sizes, dim=2)
    keys, values = (_Share.apply(x, share, ends, dtype) for x in (k_BGSK, v_BGSK))
    pieces = []
    pads = tuple(_padding(size, K, dtype) for size in sizes)
    if mask_PS is None:
        masks = _causal_masks(sizes, ends, pads, dtype, q_BHPK.device)
    else:
        rows = (
            mask_PS[..., start : start + size, :end]
            for start, size, end in zip(starts, sizes, ends, strict=True)
        )
        masks = tuple(
            _pad_rows(mask_rows.to(dtype).contiguous(), pad)
            for mask_rows, pad in zip(rows, pads, strict=True)
        )
    for q_N1MK, k_N1EK, v_N1EK, size, pad, mask in zip(
        queries, keys, values, sizes, pads, masks, strict=True
    ):
        q_N1MK = F.pad(q_N1MK, (0, 0, 0, pad)) if pad else q_N1MK
        out_N1MK = _AlignedGradient.apply(
            kernel(_AlignedGradient.apply(q_N1MK), k_N1EK, v_N1EK, mask)
        )
        pieces.append(out_N1MK[:, :, :size])
    return torch.cat(pieces, dim=2).view(B, H, P, K).to(q_BHPK.dtype)


@functools.lru_cache(maxsize=8)
def _causal_masks(
    sizes: Sequence[int],
    ends: Sequence[int],
    pads: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """The masks of all grains of a sequence, kept for the last few shapes, which all layers share.

    One cache entry holds all grains. With an entry for each grain, some would be evicted between a
    block's forward and its recomputation; selective checkpointing then meets an operator that the
    forward did not run, and raises.
    """
    with torch.inference_mode(False), torch.no_grad():
        shapes = zip(sizes, ends, pads, strict=True)
        return tuple(
            _pad_rows(last_rows(size, end, dtype, device), pad)
            for size, end, pad in shapes
        )


def _pad_rows(mask: Tensor, pad: int) -> Tensor:
    """A mask (1, 1, P, S) with more rows, which see all keys."""
    mask = F.pad(mask, (0, 0, 0, pad)) if pad else mask
    return mask.view(1, 1, *mask.shape[-2:])


class _Share(torch.autograd.Function):
    """Keys or values up to several ends, copied for every query head that shares them; gradients
    add up in float64."""

    @staticmethod
    def forward(
        ctx: Any, x_BGSK: Tensor, share: int, ends: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.settings = x_BGSK.shape, x_BGSK.dtype, share, ends
        B, G, S, K = x_BGSK.shape
        heads = (
            x_BGSK.to(dtype).repeat_interleave(share, 1).view(B * G * share, 1, S, K)
        )
        # Every head begins aligned
        heads = F.pad(heads, (0, 0, 0, _padding(S, K, dtype))).contiguous()
        return tuple(heads[:, :, :end] for end in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (B, G, S, K), dtype, share, ends = ctx.settings
        total = grads[0].new_zeros(B * G * share, 1, S, K, dtype=torch.float64)
        for end, grad in zip(ends, grads, strict=True):
            total[:, :, :end] += on_grid(grad, ACTIVATIONS)
        return total.view(B, G, share, S, K).sum(2).to(dtype), None, None, None


class _AlignedGradient(torch.autograd.Function):
    """A contiguous, aligned tensor with such a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copy = aligned(x)
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return aligned(grad)


def _padding(rows: int, width: int, dtype: torch.dtype) -> int:
    """Rows to add until the heads after one begin aligned."""
    return -rows % (ALIGNMENT // math.gcd(ALIGNMENT, width * dtype.itemsize))


class Float64Context(Wrapped):
    """Ranks exchange queries, keys and values, and their gradients, in float64.

    Gradients of copies and of parts then add up before they are rounded; the price is two to four
    times the bytes.
    """

    def attend(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, *args: Any
    ) -> Tensor:
        """The inner context's attention."""
        wide = (x.double() for x in (q_BHtK, k_BGtK, v_BGtK))
        return super().attend(*wide, *args).to(q_BHtK.dtype)
