"""A model with sums over tokens that do not depend on how sequences are spread over ranks and
micro-batches.

A grain is a piece of one sequence, of a length that the layout does not change. Everything added
over tokens (gradients of weights, routers' sums; the loss in ``fsdptoys.loss.grains``) is computed
for each grain by itself in the compute dtype, rounded to a multiple of 2⁻⁵⁰, and added over grains
in float64, where sums of such numbers are exact, so that their order does not matter. Products also
get one grain at a time: one of 7 rows rounds differently from one of 32. ``products`` joins many of
them in a call, and gives kernels that round differently in the tail of a vectorized loop as many
grains as leave none to it. Everything else works on single tokens, or on sequences of single heads,
which attention gets as a batch of their own.

Parameters are float64 here (a strategy's copies of float32 ones), cast to the compute dtype where
they are used; their gradients are float64. The price: matmuls of few rows, a float64 sum of each
weight's gradient, and casts.

On a CPU the bits also depend on the number of threads. Not covered: compiled kernels; second
derivatives. On one H200 all families keep the promise under one process, FSDP2 of one rank, and
micro-batches (torch 2.11).

Shapes: N rows, M rows of a grain, I and O inner and outer width of a matmul, D width, V vocabulary,
B batch, T sequence, H query heads, G key/value heads, K width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.exchange import Split
from fsdptoys.models.ops import Ops, Score

from . import experts
from .attention import GRADIENTS, attention_kernels, on_grid, split_rows
from .norms import LayerNorm, RMSNorm
from .products import Elementwise, add_weight_gradient, blocks_of, multiply, sum_rows


@dataclass(frozen=True)
class ExactOps(Ops):
    """Operations by grains, with float64 parameters."""

    grain: int = 1
    """Tokens of a grain; divides the tokens of a rank's part of a sequence."""
    dtype: torch.dtype = torch.float32
    """Of the computation."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Ops``."""
        rows_NI = input.reshape(-1, input.shape[-1])
        out_NO: Tensor = _Linear.apply(rows_NI, weight, bias, self.grain)
        return out_NO.view(*input.shape[:-1], -1)

    def per_channel(
        self,
        function: Callable[..., Tensor],
        hidden: Tensor,
        params: Sequence[Tensor],
        split: Split | None,
    ) -> Tensor:
        """See ``Ops``."""
        grain = rows_per_grain(hidden, self.grain)
        vectors = (self.expand(param, hidden) for param in params)
        return elementwise(function, grain, hidden, *vectors)

    def expand(self, param: Tensor, hidden: Tensor) -> Tensor:
        """A vector for each token. Its gradients are added by grains."""
        grain = rows_per_grain(hidden, self.grain)
        vectors: Tensor = _Expand.apply(param, hidden.shape, hidden.dtype, grain)
        return vectors

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """See ``Ops``."""
        rows_ND: Tensor = _Embedding.apply(ids.flatten(), table, self.grain, self.dtype)
        return rows_ND.view(*ids.shape, -1)

    def positions(self, positions: Tensor, tokens_BT: Tensor) -> Tensor:
        """Positions of each sequence: a broadcast would add gradients over the batch, rounded."""
        return positions.expand_as(tokens_BT)

    def layer_norm(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """See ``Ops``."""
        rows_ND = hidden.reshape(-1, hidden.shape[-1])
        return LayerNorm.apply(rows_ND, weight, bias, eps, self.grain).view_as(hidden)

    def gelu(self, hidden: Tensor) -> Tensor:
        """See ``Ops``."""
        return elementwise(super().gelu, self.grain, hidden)

    def rope_tables(
        self, inv_freq: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Ops``."""
        tables = super().rope_tables
        pieces = [
            tables(inv_freq, piece_T) for piece_T in positions_T.split(self.grain)
        ]
        cosines, sines = zip(*pieces, strict=True)
        return torch.cat(cosines), torch.cat(sines)

    def temperature(
        self, factors: Callable[[Tensor], Tensor], ordinals: Tensor
    ) -> Tensor:
        """See ``Ops``."""
        pieces = [factors(piece) for piece in ordinals.flatten().split(self.grain)]
        return torch.cat(pieces).view(*ordinals.shape, 1)

    def route(
        self, hidden_ND: Tensor, weight_ED: Tensor, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Ops``."""
        return experts.Routing.apply(hidden_ND, weight_ED, score, self.grain)

    def experts(self, *args: Any) -> Tensor:
        """See ``Ops``."""
        return experts.apply_experts(*args, grain=self.grain)


def exact_ops(plain: Ops, grain: int, dtype: torch.dtype) -> ExactOps:
    """The operations of a table by grains; its implementations must be PyTorch's own."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return elementwise(plain.swiglu, grain, gate, up)

    def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        # nothing is added over tokens, and every element rounds alike
        if weight is None:
            return plain.rms_norm(hidden, None, eps)
        rows_ND = hidden.reshape(-1, hidden.shape[-1])
        rows = rows_per_grain(hidden, grain)
        return RMSNorm.apply(rows_ND, weight, eps, rows).view_as(hidden)

    fields = vars(plain) | attention_kernels(plain, grain, dtype)
    fields |= {"swiglu": swiglu, "rms_norm": rms_norm}
    return ExactOps(**fields, grain=grain, dtype=dtype)


def rows_per_grain(hidden: Tensor, grain: int) -> int:
    """Rows of the last dim in a grain: several a token where there are heads (B, T, H, K)."""
    return grain * math.prod(hidden.shape[2:-1])


def elementwise(function: Callable[..., Tensor], grain: int, *inputs: Tensor) -> Tensor:
    """An elementwise function over the last dim of inputs of one shape, by grains."""
    rows = (input.reshape(-1, input.shape[-1]) for input in inputs)
    output: Tensor = Elementwise.apply(function, grain, *rows)
    return output.view_as(inputs[0])


class _Linear(torch.autograd.Function):
    """``torch.nn.functional.linear`` with float64 parameters."""

    @staticmethod
    def forward(
        ctx: Any, input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, grain: int
    ) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        ctx.grain = grain
        bias = None if bias_O is None else bias_O.to(input_NI.dtype)
        return multiply(input_NI, weight_OI.to(input_NI.dtype), bias, grain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        input_NI, weight_OI = ctx.saved_tensors
        grain = ctx.grain
        grad_NO = grad_NO.contiguous()
        grad_input_NI = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_input_NI = multiply(
                grad_NO, weight_OI.to(input_NI.dtype).t(), None, grain
            )
        if ctx.needs_input_grad[1]:
            grad_weight_OI = torch.zeros_like(
                weight_OI, memory_format=torch.contiguous_format
            )
            add_weight_gradient(grad_weight_OI, grad_NO, input_NI, grain)
        if ctx.needs_input_grad[2]:
            grad_bias_O = sum_rows(grad_NO, grain)
        return grad_input_NI, grad_weight_OI, grad_bias_O, None


class _Expand(torch.autograd.Function):
    """A float64 vector for each row in the compute dtype; its gradient is summed by grains."""

    @staticmethod
    def forward(
        ctx: Any, param_D: Tensor, shape: torch.Size, dtype: torch.dtype, grain: int
    ) -> Tensor:
        ctx.grain = grain
        return param_D.to(dtype).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND = grad.contiguous().view(-1, grad.shape[-1])
        return sum_rows(rows_ND, ctx.grain), None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a float64 table; gradients of equal ids are added within a grain first."""

    @staticmethod
    def forward(
        ctx: Any, ids_N: Tensor, table_VD: Tensor, grain: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.settings = table_VD.shape, grain
        return table_VD[ids_N].to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (ids_N,) = ctx.saved_tensors
        shape, grain = ctx.settings
        total_VD = grad_ND.new_zeros(shape, dtype=torch.float64)
        blocks = blocks_of(grad_ND)
        tokens = min(blocks.call_elements // shape[1], blocks.compared_tokens)
        for rows in split_rows(len(ids_N), grain * max(1, tokens // grain)):
            ids_M = ids_N[rows]
            grad_MD = grad_ND[rows]
            places_M = torch.arange(len(ids_M), device=ids_M.device)
            keys_M = ids_M + places_M // grain * shape[0]  # equal ids of one grain
            # The first place of an equal key gets the sum, and the others add zero: without a
            # device sync.
            first_M = torch.where(keys_M[:, None] == keys_M, places_M, len(ids_M)).amin(
                1
            )
            sums_MD = torch.zeros_like(grad_MD).index_add_(0, first_M, grad_MD)
            total_VD.index_add_(0, ids_M, on_grid(sums_MD, GRADIENTS))
        return None, total_VD, None, None
