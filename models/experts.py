"""The experts of a mixture-of-experts layer: every token through its K experts, without capacity
limits.

The (token, choice) pairs are sorted by expert and multiplied group by group (``grouped``). One
autograd function has hand-written gradients, for three reasons:

- No scatter-add: rows are gathered by the sorting permutation, and results by its inverse and
  summed over the K choices, in forward and backward. Equal inputs give equal bits.
- Few saved tensors: the input (N·D, held by its producer too), the gate and up projections (N·K·2F)
  and the permutation (3·N·K of int64). Gathered rows and the hidden layer are recomputed.
- A CPU works through pieces that stay in its cache.

The gradient of a routing weight comes from the hidden layer, in which the output is linear, so no
expert's output is saved. Likewise ``scale_input`` scales the gate and up projections instead of the
gathered input.

Not covered: second derivatives; ``torch.compile`` breaks the graph here; fake tensors, whose loads
are unknown.
Sources: arXiv:1701.06538 (experts), arXiv:2211.15841 (without dropping tokens), arXiv:2002.05202
(gated feed-forward).

Shapes: N tokens, D width, E experts, K experts of a token, F width of an expert's hidden layer, R =
N·K rows, M rows of a piece.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .grouped import Grouped, Product, Segment

Dispatch = Callable[..., Tensor]
"""In place of ``apply_experts`` where other ranks have some of the experts; same arguments."""


def apply_experts(
    hidden_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    product: Product,
    *,
    scale_input: bool = False,
) -> Tensor:
    """``moe.Experts`` with given matrices and matmul implementation (H = 2F)."""
    routes = _sort(experts_NK, gate_up_EHD.shape[0], product)
    return _Experts.apply(
        hidden_ND.contiguous(),
        weights_NK,
        gate_up_EHD,
        down_EDF,
        routes,
        product,
        scale_input,
        torch.is_grad_enabled(),
    )


class _Routes(NamedTuple):
    """Rows of the sorted (token, choice) pairs. Lengths beyond R pad the last piece."""

    pairs: Tensor
    """Row → pair n·K + k, ordered by expert."""
    tokens: Tensor
    """Row → token n."""
    rows_NK: Tensor
    """Pair → row."""
    pieces: tuple[Segment, ...]


def _sort(experts_NK: Tensor, n_experts: int, product: Product) -> _Routes:
    experts_R, pairs_R = torch.sort(experts_NK.flatten(), stable=True)
    ids_E = torch.arange(n_experts, device=experts_R.device)
    ends_E = torch.searchsorted(experts_R, ids_E, right=True, out_int32=True)
    pairs = F.pad(pairs_R, (0, product.row_multiple - 1 if len(pairs_R) else 0))
    return _Routes(
        pairs=pairs,
        tokens=pairs.div(experts_NK.shape[1], rounding_mode="floor"),
        rows_NK=torch.argsort(pairs_R).view_as(experts_NK),
        pieces=tuple(product.pieces(ends_E, pairs_R.numel())),
    )


class _Experts(torch.autograd.Function):
    """Forward and backward of all experts, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weights_NK: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        routes: _Routes,
        product: Product,
        scale_input: bool,
        keep: bool,
    ) -> Tensor:
        """``keep``: whether there will be a backward; grad mode is always off in here."""
        weights_R = weights_NK.flatten()[routes.pairs, None]
        out_RD = _rows_like(hidden_ND, routes, product)
        gate_ups = []
        with _without_autocast(hidden_ND):
            for piece in routes.pieces:
                rows = slice(piece.start, piece.start + piece.padded)
                input_MD = _gather(hidden_ND, routes.tokens[rows], piece)
                gate_up_MH = product.linear(input_MD, gate_up_EHD[piece.experts], piece)
                if keep:
                    gate_ups.append(gate_up_MH)
                gate_MF, up_MF = (
                    gate_up_MH * weights_R[rows] if scale_input else gate_up_MH
                ).chunk(2, dim=1)
                act_MF = F.silu(gate_MF).mul_(up_MF)
                out_RD = product.linear(act_MF, down_EDF[piece.experts], piece, out_RD)
            out_ND = gather_sum(
                out_RD, routes.rows_NK, product, None if scale_input else weights_NK
            )
        if keep:
            ctx.save_for_backward(
                hidden_ND, weights_NK, gate_up_EHD, down_EDF, *routes[:3], *gate_ups
            )
            ctx.pieces = routes.pieces
            ctx.product = product
            ctx.scale_input = scale_input
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weights and both matrices; those of matrices are zero for experts
        without tokens."""
        (
            hidden_ND,
            weights_NK,
            gate_up_EHD,
            down_EDF,
            pairs,
            tokens,
            rows_NK,
            *gate_ups,
        ) = ctx.saved_tensors
        product = ctx.product
        scale_input = ctx.scale_input
        routes = _Routes(pairs, tokens, rows_NK, ctx.pieces)
        weights_R = weights_NK.flatten()[pairs, None]
        grad_weights_R = torch.empty_like(weights_R)
        grad_input_RD = _rows_like(hidden_ND, routes, product)
        grad_gate_up_EHD = (
            _matrices_like(gate_up_EHD, routes, product)
            if ctx.needs_input_grad[2]
            else None
        )
        grad_down_EDF = (
            _matrices_like(down_EDF, routes, product)
            if ctx.needs_input_grad[3]
            else None
        )
        grad_ND = grad_ND.contiguous()
        with _without_autocast(hidden_ND):
            for piece, gate_up_MH in zip(routes.pieces, gate_ups, strict=True):
                rows = slice(piece.start, piece.start + piece.padded)
                weights_M = weights_R[rows]
                gate_MF, up_MF = (
                    gate_up_MH * weights_M if scale_input else gate_up_MH
                ).chunk(2, dim=1)
                silu_MF = F.silu(gate_MF)
                act_MF = silu_MF * up_MF

                grad_MD = _gather(grad_ND, tokens[rows], piece)
                grad_act_MF = product.linear(
                    grad_MD, down_EDF[piece.experts].transpose(-2, -1), piece
                )
                if not scale_input:
                    torch.sum(
                        grad_act_MF * act_MF, 1, keepdim=True, out=grad_weights_R[rows]
                    )
                    grad_act_MF.mul_(weights_M)
                    act_MF.mul_(weights_M)
                if grad_down_EDF is not None:
                    grad_down_EDF = product.outer(grad_MD, act_MF, piece, grad_down_EDF)

                grad_gate_up_MH = torch.empty_like(gate_up_MH)
                grad_gate_MF, grad_up_MF = grad_gate_up_MH.chunk(2, dim=1)
                torch.mul(grad_act_MF, silu_MF, out=grad_up_MF)
                torch.ops.aten.silu_backward.grad_input(
                    grad_act_MF.mul_(up_MF), gate_MF, grad_input=grad_gate_MF
                )
                if scale_input:
                    torch.sum(
                        grad_gate_up_MH * gate_up_MH,
                        1,
                        keepdim=True,
                        out=grad_weights_R[rows],
                    )
                    grad_gate_up_MH.mul_(weights_M)
                if ctx.needs_input_grad[0]:
                    weight_HD = gate_up_EHD[piece.experts].transpose(-2, -1)
                    grad_input_RD = product.linear(
                        grad_gate_up_MH, weight_HD, piece, grad_input_RD
                    )
                if grad_gate_up_EHD is not None:
                    input_MD = _gather(hidden_ND, tokens[rows], piece)
                    grad_gate_up_EHD = product.outer(
                        grad_gate_up_MH, input_MD, piece, grad_gate_up_EHD
                    )
            grad_hidden_ND = (
                gather_sum(grad_input_RD, rows_NK, product)
                if ctx.needs_input_grad[0]
                else None
            )
        grad_weights_NK = (
            grad_weights_R.flatten()[rows_NK] if ctx.needs_input_grad[1] else None
        )
        return (
            grad_hidden_ND,
            grad_weights_NK,
            grad_gate_up_EHD,
            grad_down_EDF,
            None,
            None,
            None,
            None,
        )


def _gather(source_ND: Tensor, tokens_M: Tensor, piece: Segment) -> Tensor:
    """Rows of the tokens; padding rows are zero, so that they add nothing to any gradient."""
    rows_MD = source_ND.index_select(0, tokens_M)
    if piece.padded > piece.length:
        rows_MD[piece.length :].zero_()
    return rows_MD


def gather_sum(
    source_RD: Tensor,
    rows_NK: Tensor,
    product: Product,
    weights_NK: Tensor | None = None,
) -> Tensor:
    """Sum of each token's K rows, optionally weighted, in the order of its choices."""
    # One pass over the rows without a copy.
    if product.one_pass_sums and source_RD.device.type == "cpu" and rows_NK.numel():
        return F.embedding_bag(
            rows_NK, source_RD, mode="sum", per_sample_weights=weights_NK
        )
    rows_NKD = source_RD.index_select(0, rows_NK.flatten()).view(
        *rows_NK.shape, source_RD.shape[1]
    )
    return (
        rows_NKD if weights_NK is None else rows_NKD.mul_(weights_NK[..., None])
    ).sum(1)


def _rows_like(source_ND: Tensor, routes: _Routes, product: Product) -> Tensor:
    """Output rows of all pieces, written in order: the next piece overwrites a piece's padding."""
    length = 0 if isinstance(product, Grouped) else len(routes.pairs)
    return source_ND.new_empty(length, source_ND.shape[1])


def _matrices_like(weight: Tensor, routes: _Routes, product: Product) -> Tensor:
    """Output for the gradients of all matrices; zero for experts without tokens."""
    if not routes.pieces:
        return torch.zeros_like(weight)
    if isinstance(product, Grouped):  # allocates its own
        return weight.new_empty(0)
    grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for expert in set(range(weight.shape[0])).difference(
        piece.experts for piece in routes.pieces
    ):
        grad[expert].zero_()
    return grad


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    device_type = tensor.device.type
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
