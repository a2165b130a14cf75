"""Cross entropy of a linear head over chunks of tokens, loss and gradients in one pass.

The logits of a training step are its largest tensor: 4,096 tokens over 128,256 classes are 1 GiB in bf16, and the plain
way keeps them twice over in float32. Here the forward takes some tokens at a time through one reused buffer: their
logits, in place of these the gradient (softmax minus one-hot), and from that at once the gradients of hidden states and
weight. These are all that is kept. The backward multiplies them by the gradient from above, and nothing is computed
twice: three products, as in the plain way, where checkpointed chunks need four.

What it costs: the gradient of the weight is added up over chunks, in float32 unless told otherwise, which for a bf16
weight is a tensor of V·D·4 bytes until the backward has rounded it. Adding it up in bf16 halves that and rounds the sum
after every chunk: the error of a bf16 weight's gradient, against float64, was 0.9 to 1.1 of the plain way's with a
float32 sum, and with a bf16 sum 1.3 to 1.5 for 8 chunks and 1.9 for 32. Where all tokens go into one chunk there is no
such sum.

- Whatever needs no gradient costs nothing: a frozen weight, frozen hidden states, or both under ``no_grad``.
- Nothing waits for the device. On a CPU, where nothing could, rows with an ignored label are left out altogether. On an
  accelerator their number is not known in time, so they take part in the products, but not in the softmax; their
  gradients are zero.
- It runs inside the head's forward, where FSDP has gathered the weight.

Not covered: second derivatives, which raise; forward-mode derivatives; a head with a bias; a vocabulary that is
sharded. The idea is that of Liger-Kernel (arXiv:2410.10989).

Shapes: N tokens, D width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .head_products import choose_products
from .objective import IGNORE_INDEX, Objective
from .softmax import softmax_gradient_

SCALE_ROWS = 4096
"""Rows of the weight's gradient that the backward rounds at a time."""


class GradientDType(Enum):
    """Number formats in which the gradient of the head's weight is added up."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def chunked_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    chunk_tokens: int | None = None,
    grad_dtype: GradientDType = GradientDType.float32,
) -> Tensor:
    """The objective summed over valid labels, as a float32 scalar.

    Args:
        hidden_ND: what the head is given.
        weight_VD: the head's weight, in the dtype of ``hidden_ND``.
        labels_N: classes, or ``IGNORE_INDEX``.
        objective: what is minimised.
        chunk_tokens: tokens a chunk; None for ``auto_chunk_tokens``.
        grad_dtype: in what the weight's gradient is added up over chunks; at least the weight's dtype if float32.
    """
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_ND, weight_VD)]
    return _ChunkedLoss.apply(hidden_ND, weight_VD, labels_N, objective, chunk_tokens, grad_dtype, *wants)


def auto_chunk_tokens(n_tokens: int, weight_VD: Tensor, sum_bytes: int) -> int:
    """How many tokens to take at a time.

    - All of them, if their logits take no more memory than the sum of the weight's gradients that several chunks need
      and one does not: V·D·4 bytes for a bf16 weight, so up to 2·D tokens. That is both the smallest and the fastest.
    - Otherwise as many as fill 256 MiB with logits, and at least 2048, on an accelerator; 32 MiB and 512 on a CPU. For
      every chunk the sum is read and written once; with 2048 tokens that is 1 byte for each 1536 operations.
    - Chunks of nearly equal size, in multiples of 32.

    Args:
        n_tokens: N.
        weight_VD: the head's weight.
        sum_bytes: size of the sum that several chunks would need, and one would not.
    """
    vocab_size, on_cpu = len(weight_VD), weight_VD.device.type == "cpu"
    row_bytes = vocab_size * weight_VD.itemsize
    if n_tokens * row_bytes <= sum_bytes:
        return max(1, n_tokens)
    most = max(2**25 // row_bytes, 512) if on_cpu else max(2**28 // row_bytes, 2048)
    chunks = -(-n_tokens // most)
    return max(32, -(-n_tokens // chunks // 32) * 32)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        objective: Objective,
        chunk_tokens: int | None,
        grad_dtype: GradientDType,
        wants_hidden: bool,
        wants_weight: bool,
    ) -> Tensor:
        """Returns the loss; keeps the gradients for an upstream gradient of 1."""
        kept = _kept_rows(labels_N)
        n_kept = labels_N.numel() if kept is None else kept.numel()
        sum_dtype = _sum_dtype(weight_VD.dtype, grad_dtype)
        if chunk_tokens is None:
            sum_bytes = weight_VD.numel() * sum_dtype.itemsize if wants_weight and sum_dtype != weight_VD.dtype else 0
            chunk_tokens = auto_chunk_tokens(n_kept, weight_VD, sum_bytes)
        if n_kept <= chunk_tokens:
            sum_dtype = weight_VD.dtype  # one product, so no sum over chunks: rounded once, by the product itself
        chunk_tokens = min(chunk_tokens, n_kept)

        products = choose_products(hidden_ND, weight_VD)
        logits = hidden_ND.new_empty(chunk_tokens, len(weight_VD))
        losses = hidden_ND.new_empty(n_kept, dtype=torch.float32)
        hidden_gradient_ND = None
        if wants_hidden:
            all_rows = n_kept == labels_N.numel()
            hidden_gradient_ND = torch.empty_like(hidden_ND) if all_rows else torch.zeros_like(hidden_ND)
        weight_gradient_VD = None
        if wants_weight:
            weight_gradient_VD = weight_VD.new_empty(weight_VD.shape, dtype=sum_dtype)
            if n_kept == 0:
                weight_gradient_VD.zero_()

        for start, rows in _chunks(n_kept, chunk_tokens, kept):
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            logits_CV = logits[: len(labels_C)]
            products.logits(hidden_CD, weight_VD, logits_CV)
            softmax_gradient_(
                logits_CV,
                labels_C,
                losses[start : start + len(labels_C)],
                objective,
                gradient=wants_hidden or wants_weight,
                some_ignored=not _leaves_out_rows(labels_N),
            )
            if hidden_gradient_ND is not None and kept is None:
                products.hidden_gradient(logits_CV, weight_VD, hidden_gradient_ND[rows])
            elif hidden_gradient_ND is not None:
                gradient_CD = torch.empty_like(hidden_CD)
                products.hidden_gradient(logits_CV, weight_VD, gradient_CD)
                hidden_gradient_ND[rows] = gradient_CD
            if weight_gradient_VD is not None:
                products.weight_gradient(logits_CV, hidden_CD, weight_gradient_VD, first=start == 0)

        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        ctx.weight_dtype = weight_VD.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients times the one from above."""
        if torch.is_grad_enabled():  # as under create_graph=True
            raise RuntimeError("the chunked loss has no second derivative; use the plain loss, memory.chunk_loss=false")
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        in_place = not _graph_is_kept()
        if hidden_gradient_ND is not None:
            hidden_gradient_ND = _scale(hidden_gradient_ND, upstream[0], hidden_gradient_ND.dtype, in_place)
        if weight_gradient_VD is not None:
            weight_gradient_VD = _scale(weight_gradient_VD, upstream[0], ctx.weight_dtype, in_place)
        return hidden_gradient_ND, weight_gradient_VD, None, None, None, None, None, None


def _sum_dtype(weight_dtype: torch.dtype, grad_dtype: GradientDType) -> torch.dtype:
    if grad_dtype is GradientDType.bfloat16:
        return torch.bfloat16
    return torch.promote_types(weight_dtype, torch.float32)


def _leaves_out_rows(labels_N: Tensor) -> bool:
    """Whether rows can be left out by their labels: on a CPU, and not while shapes alone are traced."""
    return labels_N.device.type == "cpu" and type(labels_N) is Tensor


def _kept_rows(labels_N: Tensor) -> Tensor | None:
    """Indices of the rows to compute; None for all of them."""
    if not _leaves_out_rows(labels_N):
        return None
    kept = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    return None if kept.numel() == labels_N.numel() else kept


def _chunks(n_kept: int, chunk_tokens: int, kept: Tensor | None) -> Iterator[tuple[int, slice | Tensor]]:
    """Where each chunk begins among the rows to compute, and which rows of the batch it has."""
    for start in range(0, n_kept, max(1, chunk_tokens)):
        end = min(start + chunk_tokens, n_kept)
        yield start, slice(start, end) if kept is None else kept[start:end]


def _scale(gradient: Tensor, upstream: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """``gradient * upstream`` in a dtype, rounded once."""
    # A factor without dims would be rounded to the gradient's dtype first on CUDA.
    upstream = upstream.reshape(1)
    scaled = gradient if in_place and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    # In blocks, since a CPU makes the product of each call in float32 before it rounds it.
    for rows, scaled_rows in zip(gradient.split(SCALE_ROWS), scaled.split(SCALE_ROWS), strict=True):
        torch.mul(rows, upstream, out=scaled_rows)
    return scaled


def _graph_is_kept() -> bool:
    """Whether the backward in progress may be run again, as under ``retain_graph=True``.

    Asks a private function, tried on torch 2.7.1 and 2.13; without it the answer is the careful one, at a copy's cost.
    """
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else keeps()
