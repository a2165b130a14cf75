"""Cross entropy of a linear head over chunks of tokens, loss and gradients in one pass.

The logits of a training step are its largest tensor: 4,096 tokens over 128,256 classes are 1 GiB in
bf16, and the plain loss keeps them twice more in float32. Here the forward takes a chunk of tokens
at a time through one reused buffer: it computes their logits, replaces them by their gradient
(softmax minus one-hot), and computes from it the gradients of hidden states and weight, which the
backward multiplies by the upstream gradient. Three matmuls, as in the plain loss, where
checkpointed chunks need four.

The price: the gradient of the weight is summed over chunks, by default in float32, V·D·4 bytes
until the backward. A bf16 sum halves that: the error of a bf16 weight's gradient, against float64,
was 0.9 to 1.1 times the plain loss's with a float32 sum, and with a bf16 sum 1.3 to 1.5 times for 8
chunks and 1.9 times for 32. A single chunk needs no sum.

- Frozen weights and frozen hidden states cost nothing, as does ``no_grad``.
- Nothing waits for the device. On a CPU, rows with an ignored label are left out. On an
  accelerator, where their number is not known in time, they take part in the matmuls, but not in
  the softmax; their gradients are zero.
- It runs inside the head's forward: FSDP has gathered the weight there.
- A user's loss (``own``) takes the place of the cross entropy; autograd differentiates it chunk by
  chunk.
- Ranks may split the classes (``vocabulary``); a chunk's softmax then takes a float32 copy of its
  logits.

A head may have a bias, and a soft cap c on its logits, ``c · tanh(logits / c)``: its derivative
takes a second buffer of a chunk's size.

Not covered: second derivatives, which raise; forward-mode derivatives. The idea
is Liger-Kernel's (arXiv:2410.10989).

Shapes: N tokens, D width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .head_products import choose_products
from .objective import IGNORE_INDEX, Objective
from .own import OwnLoss, own_gradient_
from .softmax import softmax_gradient_
from .vocabulary import Vocabulary, shard_gradient_

SCALE_ROWS = 4096
"""Rows of the weight's gradient that the backward rounds at a time."""


def chunked_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    chunk_tokens: int | None = None,
    grad_dtype: torch.dtype = torch.float32,
    vocabulary: Vocabulary | None = None,
    own: OwnLoss | None = None,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The objective summed over valid labels, as a float32 scalar; for the settings see
    ``build_loss``, for bias and soft cap ``cross_entropy_sum``.

    ``hidden_ND`` and ``weight_VD`` have one dtype, ``labels_N`` classes or ``IGNORE_INDEX``;
    ``grad_dtype=float32`` means at least the weight's.
    """
    wants = [
        torch.is_grad_enabled() and tensor.requires_grad
        for tensor in (hidden_ND, weight_VD, bias_V)
        if tensor is not None
    ]
    assert vocabulary is None or (bias_V is None and softcap is None)
    return _ChunkedLoss.apply(
        hidden_ND,
        weight_VD,
        labels_N,
        objective,
        chunk_tokens,
        grad_dtype,
        vocabulary,
        own,
        bias_V,
        softcap,
        *wants,
    )


def auto_chunk_tokens(n_tokens: int, weight_VD: Tensor, sum_bytes: int) -> int:
    """Choose the number of tokens per chunk.

    - All tokens, if their logits take no more memory than the sum of the weight's gradients, which
      only several chunks need: V·D·4 bytes for a bf16 weight, so up to 2·D tokens. This is both the
      smallest and the fastest.
    - Otherwise logits of 256 MiB, and at least 2048 tokens, on an accelerator; 32 MiB and 512 on a
      CPU. Each chunk reads and writes the sum once; with 2048 tokens, 1 byte per 1536 operations.
    - Chunks of nearly equal size, in multiples of 32.

    ``sum_bytes`` is the size of that sum.
    """
    vocab_size = len(weight_VD)
    on_cpu = weight_VD.device.type == "cpu"
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
        grad_dtype: torch.dtype,
        vocabulary: Vocabulary | None,
        own: OwnLoss | None,
        bias_V: Tensor | None,
        softcap: float | None,
        wants_hidden: bool,
        wants_weight: bool,
        wants_bias: bool = False,
    ) -> Tensor:
        """Return the loss; save the gradients for an upstream gradient of 1."""
        valid_rows = _valid_rows(labels_N)
        n_valid = labels_N.numel() if valid_rows is None else valid_rows.numel()
        bf16_sum = grad_dtype is torch.bfloat16
        sum_dtype = (
            grad_dtype if bf16_sum else torch.promote_types(weight_VD.dtype, grad_dtype)
        )
        if chunk_tokens is None:
            sum_bytes = (
                weight_VD.numel() * sum_dtype.itemsize
                if wants_weight and sum_dtype != weight_VD.dtype
                else 0
            )
            chunk_tokens = auto_chunk_tokens(n_valid, weight_VD, sum_bytes)
        if n_valid <= chunk_tokens:
            # one matmul, so no sum over chunks: the matmul rounds once
            sum_dtype = weight_VD.dtype
        chunk_tokens = min(chunk_tokens, n_valid)

        products = choose_products(hidden_ND, weight_VD)
        logits = hidden_ND.new_empty(chunk_tokens, len(weight_VD))
        losses = hidden_ND.new_empty(n_valid, dtype=torch.float32)
        hidden_gradient_ND = None
        if wants_hidden:
            all_rows = n_valid == labels_N.numel()
            hidden_gradient_ND = (
                torch.empty_like(hidden_ND) if all_rows else torch.zeros_like(hidden_ND)
            )
        weight_gradient_VD = None
        if wants_weight:
            weight_gradient_VD = weight_VD.new_empty(weight_VD.shape, dtype=sum_dtype)
            if n_valid == 0:
                weight_gradient_VD.zero_()
        bias_gradient_V = None
        if wants_bias:
            assert bias_V is not None
            bias_gradient_V = torch.zeros_like(bias_V, dtype=torch.float32)
        capped = None if softcap is None else torch.empty_like(logits)

        for start, rows in _chunks(n_valid, chunk_tokens, valid_rows):
            hidden_CD = hidden_ND[rows]
            labels_C = labels_N[rows]
            logits_CV = logits[: len(labels_C)]
            products.logits(hidden_CD, weight_VD, logits_CV)
            if bias_V is not None:
                logits_CV += bias_V
            if softcap is not None:
                assert capped is not None
                capped_CV = capped[: len(labels_C)]
                torch.tanh(logits_CV.div_(softcap), out=capped_CV)
                torch.mul(capped_CV, softcap, out=logits_CV)
            losses_C = losses[start : start + len(labels_C)]
            gradient = wants_hidden or wants_weight or wants_bias
            if own is not None:
                losses_C.copy_(
                    own_gradient_(
                        logits_CV,
                        labels_C,
                        own,
                        objective.gradient_scale,
                        gradient=gradient,
                    )
                )
            elif vocabulary is None:
                some_ignored = not _leaves_out_rows(labels_N)
                softmax_gradient_(
                    logits_CV,
                    labels_C,
                    losses_C,
                    objective,
                    gradient=gradient,
                    some_ignored=some_ignored,
                )
            else:
                values_CV = logits_CV.float()
                losses_C.copy_(
                    shard_gradient_(
                        values_CV, labels_C, objective, vocabulary, gradient=gradient
                    )
                )
                logits_CV.copy_(values_CV)
            if softcap is not None and gradient:
                # the derivative of the cap is 1 - tanh²
                logits_CV.addcmul_(logits_CV * capped_CV, capped_CV, value=-1)
            if bias_gradient_V is not None:
                bias_gradient_V += logits_CV.sum(0, dtype=torch.float32)
            if hidden_gradient_ND is not None and valid_rows is None:
                products.hidden_gradient(logits_CV, weight_VD, hidden_gradient_ND[rows])
            elif hidden_gradient_ND is not None:
                gradient_CD = torch.empty_like(hidden_CD)
                products.hidden_gradient(logits_CV, weight_VD, gradient_CD)
                hidden_gradient_ND[rows] = gradient_CD
            if weight_gradient_VD is not None:
                products.weight_gradient(
                    logits_CV, hidden_CD, weight_gradient_VD, first=start == 0
                )

        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD, bias_gradient_V)
        ctx.weight_dtype = weight_VD.dtype
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        ctx.gradient_scale = objective.gradient_scale
        return (
            losses if vocabulary is None else losses[vocabulary.own_rows(n_valid)]
        ).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the saved gradients by the upstream one."""
        if torch.is_grad_enabled():  # as under create_graph=True
            raise RuntimeError(
                "the chunked loss has no second derivative; use the plain loss, "
                "memory.chunk_loss=false"
            )
        hidden_gradient_ND, weight_gradient_VD, bias_gradient_V = ctx.saved_tensors
        factor = (
            upstream[0] if ctx.gradient_scale == 1 else upstream[0] / ctx.gradient_scale
        )
        in_place = not _graph_is_kept()
        if hidden_gradient_ND is not None:
            hidden_gradient_ND = _scale(
                hidden_gradient_ND, factor, hidden_gradient_ND.dtype, in_place
            )
        if weight_gradient_VD is not None:
            weight_gradient_VD = _scale(
                weight_gradient_VD, factor, ctx.weight_dtype, in_place
            )
        if bias_gradient_V is not None:
            bias_gradient_V = _scale(
                bias_gradient_V, factor, ctx.bias_dtype, in_place=False
            )
        further = len(ctx.needs_input_grad) - 9
        return (
            hidden_gradient_ND,
            weight_gradient_VD,
            *[None] * 6,
            bias_gradient_V,
            *[None] * further,
        )


def _leaves_out_rows(labels_N: Tensor) -> bool:
    """Whether rows can be left out by their labels: on a CPU, except with fake tensors."""
    return labels_N.device.type == "cpu" and type(labels_N) is Tensor


def _valid_rows(labels_N: Tensor) -> Tensor | None:
    """Indices of the rows to compute; None for all of them."""
    if not _leaves_out_rows(labels_N):
        return None
    valid_rows = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    return None if valid_rows.numel() == labels_N.numel() else valid_rows


def _chunks(
    n_valid: int, chunk_tokens: int, valid_rows: Tensor | None
) -> Iterator[tuple[int, slice | Tensor]]:
    """Start of each chunk among the rows to compute, and its rows of the batch."""
    for start in range(0, n_valid, max(1, chunk_tokens)):
        end = min(start + chunk_tokens, n_valid)
        yield start, slice(start, end) if valid_rows is None else valid_rows[start:end]


def _scale(
    gradient: Tensor, upstream: Tensor, dtype: torch.dtype, in_place: bool
) -> Tensor:
    """``gradient * upstream`` in a dtype, rounded once."""
    # CUDA would round a 0-dim factor to the gradient's dtype first.
    upstream = upstream.reshape(1)
    scaled = (
        gradient
        if in_place and gradient.dtype == dtype
        else torch.empty_like(gradient, dtype=dtype)
    )
    # In blocks, since a CPU computes the result of each call in float32 before rounding.
    for rows, scaled_rows in zip(
        gradient.split(SCALE_ROWS), scaled.split(SCALE_ROWS), strict=True
    ):
        torch.mul(rows, upstream, out=scaled_rows)
    return scaled


def _graph_is_kept() -> bool:
    """Whether the current backward may run again, as under ``retain_graph=True``.

    Uses a private function (tried with torch 2.7.1 and 2.13); without it assumes True, at the cost
    of a copy.
    """
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else keeps()
