"""A model whose sums over tokens do not depend on how sequences are spread over ranks and micro-batches.

A grain is a piece of one sequence, of a length that the layout does not change. Everything added over tokens (gradients
of weights, routers' sums; the loss in ``fsdptoys.loss.grains``) is computed for each grain by itself in the compute
dtype, rounded to a multiple of 2⁻⁵⁰, and added over grains in float64, where sums of such numbers are exact, so that
their order does not matter. Products also get one grain at a time: one of 7 rows rounds differently from one of 32.
``grain_products`` joins many of them in a call, and gives kernels that round differently in the tail of a vectorized
loop as many grains as leave none to it. Everything else works on single tokens, or on sequences of single heads, which
attention gets as a batch of their own.

Parameters are float64 here (a strategy's copies of float32 ones), cast to the compute dtype where they are used; their
gradients are float64. The price: matmuls of few rows, a float64 sum of each weight's gradient, and casts.

On a CPU the bits also depend on the number of threads. Not covered: compiled kernels; second derivatives. On one
H200 all families keep the promise under one process, FSDP2 of one rank, and micro-batches (torch 2.11).

Shapes: N rows, M rows of a grain, I and O inner and outer width of a matmul, D width, V vocabulary, B batch, T
sequence, H query heads, G key/value heads, K width of a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .decoder import DecoderModel
from .grain_attention import GRADIENTS, attention_kernels, on_grid, split_rows
from .grain_experts import use_grain_experts
from .grain_norms import LayerNorm, RMSNorm
from .grain_products import Elementwise, add_weight_gradient, blocks_of, multiply, sum_rows
from .grain_slices import OneRank, Slices, use_slices
from .kernels import Kernels, use_kernels
from .layers import Attention, AttentionTemperature, GELUFeedForward, LMHead
from .linear import Linear


def use_grains(model: DecoderModel, grain: int, dtype: torch.dtype, slices: int = 1) -> None:
    """Replace the operations of a model that is not wrapped yet.

    Args:
        model: its kernels must be PyTorch's own.
        grain: tokens of a grain; divides the tokens of a rank's part of a sequence.
        dtype: of the computation; parameters will be float64.
        slices: of features, over which sums are added in float64 (``grain_slices``); 1 for none.
    """
    for module in model.modules():
        if isinstance(module, LMHead):
            module.forward = functools.partial(_head_forward, module, grain)  # type: ignore[method-assign]
        elif isinstance(module, Linear):
            module.multiply = functools.partial(_linear_forward, module, grain)  # type: ignore[method-assign]
        elif isinstance(module, nn.Embedding):
            module.forward = functools.partial(_embedding_forward, module, grain, dtype)  # type: ignore[method-assign]
        elif isinstance(module, nn.LayerNorm):
            module.forward = functools.partial(_layer_norm_forward, module, grain)  # type: ignore[method-assign]
        elif isinstance(module, GELUFeedForward):
            module.forward = functools.partial(_gelu_forward, module, grain)  # type: ignore[method-assign]
        elif isinstance(module, Attention) and module.temperature is not None:
            module.temperature = _GrainTemperature(module.temperature.scale, module.temperature.floor, grain)
    use_grain_experts(model, grain)
    model.rotations = functools.partial(_rotations, model.rotations, grain)  # type: ignore[method-assign]
    model.embed = functools.partial(_embed, model.embed)  # type: ignore[method-assign]
    use_kernels(model, _grain_kernels(model.kernels, grain, dtype))
    if slices > 1:
        use_slices(model, Slices(slices, grain, dtype), OneRank(dtype))


def _grain_kernels(kernels: Kernels, grain: int, dtype: torch.dtype) -> Kernels:
    return dataclasses.replace(
        kernels,
        **attention_kernels(kernels, grain, dtype),
        rms_norm=functools.partial(_rms_norm, kernels.rms_norm, grain),
        swiglu=functools.partial(_swiglu, kernels.swiglu, grain),
    )


class _Linear(torch.autograd.Function):
    """``torch.nn.functional.linear`` with float64 parameters."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, grain: int) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        ctx.grain = grain
        bias = None if bias_O is None else bias_O.to(input_NI.dtype)
        return multiply(input_NI, weight_OI.to(input_NI.dtype), bias, grain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        (input_NI, weight_OI), grain = ctx.saved_tensors, ctx.grain
        grad_NO = grad_NO.contiguous()
        grad_input_NI = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_input_NI = multiply(grad_NO, weight_OI.to(input_NI.dtype).t(), None, grain)
        if ctx.needs_input_grad[1]:
            grad_weight_OI = torch.zeros_like(weight_OI, memory_format=torch.contiguous_format)
            add_weight_gradient(grad_weight_OI, grad_NO, input_NI, grain)
        if ctx.needs_input_grad[2]:
            grad_bias_O = sum_rows(grad_NO, grain)
        return grad_input_NI, grad_weight_OI, grad_bias_O, None


class _Embedding(torch.autograd.Function):
    """Rows of a float64 table; gradients of equal ids are added within a grain first."""

    @staticmethod
    def forward(ctx: Any, ids_N: Tensor, table_VD: Tensor, grain: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.settings = table_VD.shape, grain
        return table_VD[ids_N].to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (ids_N,), (shape, grain) = ctx.saved_tensors, ctx.settings
        total_VD = grad_ND.new_zeros(shape, dtype=torch.float64)
        blocks = blocks_of(grad_ND)
        tokens = min(blocks.call_elements // shape[1], blocks.compared_tokens)
        for rows in split_rows(len(ids_N), grain * max(1, tokens // grain)):
            ids_M, grad_MD = ids_N[rows], grad_ND[rows]
            places_M = torch.arange(len(ids_M), device=ids_M.device)
            keys_M = ids_M + places_M // grain * shape[0]  # equal ids of one grain
            # The first place of an equal key gets the sum, and the others add zero: without a device sync.
            first_M = torch.where(keys_M[:, None] == keys_M, places_M, len(ids_M)).amin(1)
            sums_MD = torch.zeros_like(grad_MD).index_add_(0, first_M, grad_MD)
            total_VD.index_add_(0, ids_M, on_grid(sums_MD, GRADIENTS))
        return None, total_VD, None, None


def _linear_forward(module: Linear, grain: int, input: Tensor) -> Tensor:
    out_NO: Tensor = _Linear.apply(input.reshape(-1, input.shape[-1]), module.weight, module.bias, grain)
    return out_NO.view(*input.shape[:-1], -1)


def _head_forward(
    module: LMHead, grain: int, hidden_BTD: Tensor, labels_BT: Tensor | None = None, loss_fn: Any = None
) -> Tensor:
    if labels_BT is None:
        return _linear_forward(module, grain, hidden_BTD)
    return LMHead.forward(module, hidden_BTD, labels_BT, loss_fn)


def _embedding_forward(module: nn.Embedding, grain: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    hidden_ND: Tensor = _Embedding.apply(ids.flatten(), module.weight, grain, dtype)
    return hidden_ND.view(*ids.shape, -1)


def _layer_norm_forward(module: nn.LayerNorm, grain: int, hidden: Tensor) -> Tensor:
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    return LayerNorm.apply(hidden_ND, module.weight, module.bias, module, grain).view_as(hidden)


def _rms_norm(kernel: Callable[..., Tensor], grain: int, hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:  # nothing is added over tokens, and all its operations round alike wherever an element lies
        return kernel(hidden, None, eps)
    rows_per_token = math.prod(hidden.shape[2:-1])
    rows_ND = hidden.reshape(-1, hidden.shape[-1])
    return RMSNorm.apply(rows_ND, weight, eps, grain * rows_per_token).view_as(hidden)


def _swiglu(kernel: Callable[[Tensor, Tensor], Tensor], grain: int, gate: Tensor, up: Tensor) -> Tensor:
    rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
    return Elementwise.apply(kernel, grain, *rows).view_as(gate)


def _gelu_forward(module: GELUFeedForward, grain: int, hidden_BTD: Tensor) -> Tensor:
    up = module.up_proj(hidden_BTD)
    gelu = functools.partial(F.gelu, approximate="tanh")
    return module.down_proj(Elementwise.apply(gelu, grain, up.reshape(-1, up.shape[-1])).view_as(up))


def _embed(embed: Callable[[Tensor, Tensor], Tensor], tokens_BT: Tensor, positions: Tensor) -> Tensor:
    # Positions for each sequence: a broadcast would add their gradients over the batch in the compute dtype.
    return embed(tokens_BT, positions.expand_as(tokens_BT))


def _rotations(
    rotations: Callable[[Tensor], tuple[Tensor, Tensor] | None], grain: int, positions_T: Tensor
) -> tuple[Tensor, Tensor] | None:
    pieces = [rotations(piece_T) for piece_T in positions_T.split(grain)]
    cosines, sines = [each[0] for each in pieces if each], [each[1] for each in pieces if each]
    return (torch.cat(cosines), torch.cat(sines)) if cosines else None


@dataclasses.dataclass(frozen=True)
class _GrainTemperature(AttentionTemperature):
    """Factors of one grain at a time."""

    grain: int

    def factors(self, ordinals: Tensor) -> Tensor:
        """See ``AttentionTemperature``."""
        pieces = [AttentionTemperature.factors(self, piece) for piece in ordinals.flatten().split(self.grain)]
        return torch.cat(pieces).view(*ordinals.shape, 1)
