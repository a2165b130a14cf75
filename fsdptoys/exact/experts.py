"""Routers and experts with the same sums over tokens under every layout (``exact.ops``).

The rows of each expert are split by grain too, so that a matmul has the rows of one grain and one
expert, wherever both are: other ranks may have the expert. The price: grains × experts small
matmuls in a Python loop, or, for small experts, rows padded for one call of all (``products``); and
one device sync a layer.

Shapes: N tokens, D width, E experts, K experts of a token, F width of an expert's hidden layer, R =
N·K rows, M rows of a group.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.experts import Dispatch
from fsdptoys.models.linear import linear
from fsdptoys.models.ops import Score

from .attention import GRADIENTS, aligned, on_grid, split_rows
from .products import LANES, add_weight_gradient, blocks_of, joins, multiply, sum_grains


class Group(NamedTuple):
    """Rows that are multiplied by themselves."""

    expert: int
    rows: slice


class Routing(torch.autograd.Function):
    """``Ops.route``, with the sums over tokens by grains, and over grains in float64."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_ED: Tensor, score: Score, grain: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Ops.route``."""
        logits_NE = multiply(hidden_ND, weight_ED.to(hidden_ND.dtype), None, grain)
        parts = [score(padded_RE) for padded_RE, _ in _padded(logits_NE)]
        experts_NK, weights_NK, probabilities_NE, squares_N = (
            torch.cat(blocks)[: len(logits_NE)] for blocks in zip(*parts, strict=True)
        )
        ctx.mark_non_differentiable(experts_NK)
        ctx.save_for_backward(hidden_ND, weight_ED, logits_NE)
        ctx.settings = score, grain
        terms = torch.cat([probabilities_NE, squares_N[:, None]], 1)
        return experts_NK, weights_NK, sum_grains(terms, grain).double().sum(0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, grad_NK: Tensor, grad_sums: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the matrix."""
        hidden_ND, weight_ED, logits_NE = ctx.saved_tensors
        score, grain = ctx.settings
        grad_NE = torch.empty_like(logits_NE)
        for padded_RE, rows in _padded(logits_NE):
            leaf_RE = padded_RE.detach().requires_grad_()
            with torch.enable_grad():
                _, *outputs = score(leaf_RE)
            grad_chosen_RK = torch.zeros_like(outputs[0])
            cast_grad_sums = grad_sums.to(outputs[1].dtype)
            grad_chosen_RK[: rows.stop - rows.start] = grad_NK[rows]
            gradients = [
                grad_chosen_RK,
                cast_grad_sums[:-1].expand_as(outputs[1]),
                cast_grad_sums[-1].expand_as(outputs[2]),
            ]
            (grad_RE,) = torch.autograd.grad(outputs, leaf_RE, gradients)
            grad_NE[rows] = grad_RE[: rows.stop - rows.start]
        grad_weight_ED = torch.zeros_like(
            weight_ED, memory_format=torch.contiguous_format
        )
        add_weight_gradient(grad_weight_ED, grad_NE, hidden_ND, grain)
        return (
            multiply(grad_NE, weight_ED.to(hidden_ND.dtype).t(), None, grain),
            grad_weight_ED,
            None,
            None,
        )


def _padded(logits_NE: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Some rows at a time, padded until a vectorized loop over them or their elements leaves none
    to its tail."""
    for rows in split_rows(
        len(logits_NE),
        LANES
        * max(1, blocks_of(logits_NE).call_elements // (LANES * logits_NE.shape[1])),
    ):
        yield F.pad(logits_NE[rows], (0, 0, 0, -(rows.stop - rows.start) % LANES)), rows


class Routes(NamedTuple):
    """Rows of the (token, choice) pairs, sorted by expert, and for each expert by grain."""

    pairs_R: Tensor
    """Row → pair n·K + k."""
    tokens_R: Tensor
    """Row → token."""
    rows_NK: Tensor
    """Pair → row."""
    counts_EG: Tensor
    """Rows of each expert and grain."""


def sort_rows(experts_NK: Tensor, n_experts: int, grain: int) -> Routes:
    """Sort the pairs."""
    N, K = experts_NK.shape
    n_grains = -(-N // grain)
    grains_N = torch.arange(N, device=experts_NK.device) // grain
    keys_R, pairs_R = torch.sort(
        (experts_NK * n_grains + grains_N[:, None]).flatten(), stable=True
    )
    # Neither bincount nor one_hot: both sync with the device.
    ends = torch.searchsorted(
        keys_R, torch.arange(n_experts * n_grains, device=keys_R.device), right=True
    )
    counts_EG = ends.diff(prepend=ends.new_zeros(1)).view(n_experts, n_grains)
    return Routes(pairs_R, pairs_R // K, torch.argsort(pairs_R).view(N, K), counts_EG)


def list_groups(counts: Sequence[Sequence[Sequence[int]]]) -> list[Group]:
    """Groups of rows that are sorted by source, expert and grain, from their numbers."""
    groups = []
    start = 0
    for of_source in counts:
        for expert, of_expert in enumerate(of_source):
            for count in of_expert:
                if count:
                    groups.append(Group(expert, slice(start, start + count)))
                start += count
    return groups


class _Pairs(torch.autograd.Function):
    """A row for each pair, or if ``adds`` the sum of each token's K rows.

    Each is the gradient of the other.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, adds: bool) -> Tensor:
        ctx.settings = routes, adds
        return sum_choices(rows, routes.rows_NK) if adds else rows[routes.tokens_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        routes, adds = ctx.settings
        grad_rows = grad[routes.tokens_R] if adds else sum_choices(grad, routes.rows_NK)
        return grad_rows, None, None


def sum_choices(rows_RD: Tensor, rows_NK: Tensor) -> Tensor:
    """Add K rows for each token in float32, one after the other."""
    total_ND = rows_RD[rows_NK[:, 0]].float()
    for rows_N in rows_NK.unbind(1)[1:]:
        total_ND += rows_RD[rows_N]
    return total_ND.to(rows_RD.dtype)


class _JoinedProducts(torch.autograd.Function):
    """``_GroupProducts`` of small experts, with the groups of each padded to the rows of a grain,
    in one ``bmm``.

    S padded rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_RD: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        groups: Sequence[Group],
        grain: int,
    ) -> Tensor:
        dtype = input_RD.dtype
        stacks = (gate_up_EHD, down_EDF)
        gate_up, down = (stack.to(dtype).float() for stack in stacks)
        slots_R, parts = _pad_groups(groups, grain)
        input_SD = input_RD.new_zeros(
            len(groups) * grain, input_RD.shape[1], dtype=torch.float32
        )
        input_SD[slots_R] = input_RD.float()
        gate_up_SH = _multiply_parts(
            input_SD, gate_up.transpose(1, 2), parts, grain, dtype
        )
        gate_SF, up_SF = (
            half.contiguous() for half in gate_up_SH.to(dtype).chunk(2, dim=1)
        )
        out_SD = _multiply_parts(
            (F.silu(gate_SF) * up_SF).float(), down.transpose(1, 2), parts, grain, dtype
        )
        ctx.save_for_backward(input_SD, gate_SF, up_SF, slots_R, *stacks)
        ctx.settings = parts, grain, dtype
        return out_SD[slots_R].to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        input_SD, gate_SF, up_SF, slots_R, *stacks = ctx.saved_tensors
        parts, grain, dtype = ctx.settings
        gate_up, down = (stack.to(dtype).float() for stack in stacks)
        grad_SD = torch.zeros_like(input_SD)
        grad_SD[slots_R] = grad_RD.float()
        silu_SF = F.silu(gate_SF)
        grad_act_SF = _multiply_parts(grad_SD, down, parts, grain, dtype).to(dtype)
        grad_gate_SF = torch.ops.aten.silu_backward(grad_act_SF * up_SF, gate_SF)
        grad_gate_up_SH = torch.cat([grad_gate_SF, grad_act_SF * silu_SF], 1).float()
        grad_input_SD = _multiply_parts(grad_gate_up_SH, gate_up, parts, grain, dtype)
        totals = [
            torch.zeros_like(stack, memory_format=torch.contiguous_format)
            for stack in stacks
        ]
        for expert, rows in parts:
            add_weight_gradient(
                totals[0][expert], grad_gate_up_SH[rows], input_SD[rows], grain, dtype
            )
            add_weight_gradient(
                totals[1][expert],
                grad_SD[rows],
                (silu_SF * up_SF)[rows].float(),
                grain,
                dtype,
            )
        return grad_input_SD[slots_R].to(dtype), *totals, None, None


def _pad_groups(groups: Sequence[Group], grain: int) -> tuple[Tensor, list[Group]]:
    """The padded row of each row, and each expert's padded rows."""
    # Stable: an expert's groups keep their order.
    order = sorted(range(len(groups)), key=lambda index: groups[index].expert)
    starts = {index: position * grain for position, index in enumerate(order)}
    slots = [
        torch.arange(starts[index], starts[index] + rows.stop - rows.start)
        for index, (_, rows) in enumerate(groups)
    ]
    parts = []
    start = 0
    for expert, count in sorted(Counter(group.expert for group in groups).items()):
        parts.append(Group(expert, slice(start, start + count * grain)))
        start += count * grain
    return torch.cat(slots), parts


def _multiply_parts(
    rows_SI: Tensor,
    weight_EIO: Tensor,
    parts: Sequence[Group],
    grain: int,
    dtype: torch.dtype,
) -> Tensor:
    """Each grain's product with its expert's matrix, in float32, rounded to a dtype."""
    out_SO = rows_SI.new_empty(len(rows_SI), weight_EIO.shape[2], dtype=dtype)
    for expert, rows in parts:
        rows_GMI = rows_SI[rows].view(-1, grain, rows_SI.shape[1])
        weight_GIO = weight_EIO[expert].expand(len(rows_GMI), -1, -1)
        out_SO[rows] = torch.bmm(rows_GMI, weight_GIO).flatten(0, 1)
    return out_SO


class _GroupProducts(torch.autograd.Function):
    """Gated feed-forward of each group of rows with its expert's float64 matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        input_RD: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        groups: Sequence[Group],
    ) -> Tensor:
        gate_up, down = (
            stack.to(input_RD.dtype).contiguous() for stack in (gate_up_EHD, down_EDF)
        )
        gate_up_RH = input_RD.new_empty(len(input_RD), gate_up.shape[1])
        out_RD = torch.empty_like(input_RD)
        for expert, rows in groups:
            gate_up_MH = linear(aligned(input_RD[rows]), gate_up[expert])
            gate_up_RH[rows] = gate_up_MH
            gate_MF, up_MF = (half.contiguous() for half in gate_up_MH.chunk(2, dim=1))
            out_RD[rows] = linear(F.silu(gate_MF).mul_(up_MF), down[expert])
        ctx.save_for_backward(input_RD, gate_up_RH, gate_up_EHD, down_EDF)
        ctx.groups = groups
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        input_RD, gate_up_RH, gate_up_EHD, down_EDF = ctx.saved_tensors
        gate_up, down = (
            stack.to(input_RD.dtype).contiguous() for stack in (gate_up_EHD, down_EDF)
        )
        grad_gate_up_EHD, grad_down_EDF = (
            torch.zeros_like(stack, memory_format=torch.contiguous_format)
            for stack in (gate_up_EHD, down_EDF)
        )
        grad_input_RD = torch.empty_like(input_RD)
        for expert, rows in ctx.groups:
            grad_MD = aligned(grad_RD[rows])
            input_MD = aligned(input_RD[rows])
            gate_MF, up_MF = (
                half.contiguous() for half in gate_up_RH[rows].chunk(2, dim=1)
            )
            silu_MF = F.silu(gate_MF)
            grad_down_EDF[expert] += on_grid(
                linear(grad_MD.t(), (silu_MF * up_MF).t()), GRADIENTS
            )
            grad_act_MF = linear(grad_MD, down[expert].t())
            grad_gate_MF = torch.ops.aten.silu_backward(grad_act_MF * up_MF, gate_MF)
            grad_gate_up_MH = torch.cat([grad_gate_MF, grad_act_MF.mul_(silu_MF)], 1)
            grad_gate_up_EHD[expert] += on_grid(
                linear(grad_gate_up_MH.t(), input_MD.t()), GRADIENTS
            )
            grad_input_RD[rows] = linear(grad_gate_up_MH, gate_up[expert].t())
        return grad_input_RD, grad_gate_up_EHD, grad_down_EDF, None


def apply_experts(
    hidden_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    dispatch: Dispatch | None,
    scale_input: bool,
    *,
    grain: int,
) -> Tensor:
    """See ``Ops.experts``; ``dispatch`` has a method for groups of rows."""
    routes = sort_rows(experts_NK, gate_up_EHD.shape[0], grain)
    weights_R1 = weights_NK.flatten()[routes.pairs_R, None]
    rows_RD = _Pairs.apply(hidden_ND, routes, False)
    if scale_input:
        rows_RD = rows_RD * weights_R1
    stacks = gate_up_EHD, down_EDF
    if dispatch is None:
        # one device sync
        out_RD = _multiply(grain, rows_RD, *stacks, [routes.counts_EG.tolist()])
    else:
        exchange: Any = dispatch
        multiply_rows = functools.partial(_multiply, grain)
        out_RD = exchange.multiply_groups(
            rows_RD, routes.counts_EG, *stacks, multiply_rows
        )
    if not scale_input:
        out_RD = out_RD * weights_R1
    out_ND: Tensor = _Pairs.apply(out_RD, routes, True)
    return out_ND


def _multiply(
    grain: int,
    rows_RD: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    counts: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    groups = list_groups(counts)
    out_RD: Tensor
    # A token sends one row to an expert at most, so a group has no more rows than a grain.
    if (
        groups
        and joins(rows_RD[:0], grain, *gate_up_EHD.shape[1:])
        and not grain * down_EDF.shape[2] % LANES
    ):
        out_RD = _JoinedProducts.apply(rows_RD, gate_up_EHD, down_EDF, groups, grain)
    else:
        out_RD = _GroupProducts.apply(rows_RD, gate_up_EHD, down_EDF, groups)
    return out_RD
