"""The loss of each row of logits and its gradient in place, as one Triton kernel. Imported on CUDA
only.

One program per row, in two passes. The first keeps a running maximum and a running sum of
exponentials in every lane (arXiv:1805.02867), so lanes are combined once per row and not per block;
the second writes the gradient. Rows with an ignored label skip the first pass and are filled with
zeros. A label outside the vocabulary makes the loss NaN rather than stop the device.

Not covered: splitting a row over several programs, which pays only for fewer rows than a GPU has
processors. The logic was run in Triton's interpreter (3.3.1 and 3.9.0); it has not been timed on a
GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .objective import IGNORE_INDEX, Objective

MAX_BLOCK = 4096
"""Logits of a row per block: with 8 warps they leave registers for four programs per processor."""


def softmax_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    losses_C: Tensor,
    objective: Objective,
    gradient: bool,
) -> None:
    """Write the loss of each row, and replace its logits by the gradient of that loss; see
    ``softmax``."""
    C, V = logits_CV.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(V))
    with torch.cuda.device_of(logits_CV):
        _softmax_gradient_row[(C,)](
            logits_CV,
            labels_C,
            losses_C,
            logits_CV.stride(0),
            V,
            objective.label_smoothing,
            objective.z_loss_coef,
            objective.gradient_scale,
            IGNORED=IGNORE_INDEX,
            GRADIENT=gradient,
            SMOOTHED=objective.label_smoothing != 0,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )


@triton.jit
def _softmax_gradient_row(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    row_stride: tl.tensor,
    n_classes: tl.tensor,
    smoothing: tl.tensor,
    z_loss_coef: tl.tensor,
    gradient_scale: tl.tensor,
    IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)

    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, n_classes, BLOCK):
                tl.store(logits + start + lanes, zeros, mask=start + lanes < n_classes)
        return

    is_class = (label >= 0) & (label < n_classes)
    label_logit = tl.load(logits + label, mask=is_class, other=float("nan")).to(
        tl.float32
    )

    # A finite start: the difference of two infinities would be NaN in lanes without a class.
    tops = tl.full((BLOCK,), -3.0e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_classes, BLOCK):
        inside = start + lanes < n_classes
        values = tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(tops, values)
        sums = sums * tl.exp(tops - higher) + tl.exp(values - higher)
        tops = higher
        if SMOOTHED:
            totals += tl.where(inside, values, 0.0)
    top = tl.max(tops, axis=0)
    total_exp = tl.sum(sums * tl.exp(tops - top), axis=0)
    log_sum = tl.log(total_exp)
    logsumexp = top + log_sum

    loss = (
        (1.0 - smoothing) * (top - label_logit)
        + log_sum
        + z_loss_coef * logsumexp * logsumexp
    )
    if SMOOTHED:
        loss += smoothing * (top - tl.sum(totals, axis=0) / n_classes)
    tl.store(losses + row, loss)

    if GRADIENT:
        # All threads must read the label's logit before one overwrites it.
        tl.debug_barrier()
        factor = (1.0 + 2.0 * z_loss_coef * logsumexp) / total_exp
        for start in range(0, n_classes, BLOCK):
            inside = start + lanes < n_classes
            values = tl.load(logits + start + lanes, mask=inside, other=0.0).to(
                tl.float32
            )
            gradient = tl.exp(values - top) * factor
            if SMOOTHED:
                gradient -= smoothing / n_classes
            gradient = tl.where(
                start + lanes == label, gradient - (1.0 - smoothing), gradient
            )
            tl.store(logits + start + lanes, gradient * gradient_scale, mask=inside)
