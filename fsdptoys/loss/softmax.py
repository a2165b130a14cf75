"""The loss of each row of logits, and its gradient in place of the logits: softmax minus one-hot.

On CUDA one Triton kernel reads the logits twice and writes them once (``softmax_triton``).
Elsewhere, and where Triton cannot compile, a few rows at a time are copied to float32, processed in
place and rounded back: on a CPU as many as fit in cache, since each pass over them would otherwise
wait for memory. 512 rows of 32,000 logits in bf16 take 22 ms on one CPU thread, where
``F.cross_entropy`` and its backward take 192.

Shapes: C rows of logits, V classes, R rows at a time.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .objective import IGNORE_INDEX, Objective

SoftmaxKernel = Callable[[Tensor, Tensor, Tensor, Objective, bool], None]

CPU_BLOCK_BYTES = 2**20
"""float32 logits per thread at a time, as many as fit in a core's own cache."""
DEVICE_BLOCK_BYTES = 2**26
"""float32 logits at a time on an accelerator without the kernel."""


def softmax_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    losses_C: Tensor,
    objective: Objective,
    *,
    gradient: bool,
    some_ignored: bool = True,
) -> None:
    """Write the loss of each row, and replace its logits by the gradient of that loss, without a
    device sync.

    The gradient is multiplied by ``objective.gradient_scale``.

    Args:
        logits_CV: any floating dtype, rows contiguous; processed in float32 at least.
        labels_C: classes, or ``IGNORE_INDEX`` for rows without loss and gradient.
        losses_C: float32, overwritten.
        objective: function to minimize.
        gradient: whether to compute the gradient; without it the logits end up undefined.
        some_ignored: whether there may be ignored rows.
    """
    # Fake tensors have a device but no memory for a kernel.
    kernel = (
        _triton_kernel() if logits_CV.is_cuda and type(logits_CV) is Tensor else None
    )
    if kernel is not None:
        kernel(logits_CV, labels_C, losses_C, objective, gradient)
        return
    C, V = logits_CV.shape
    dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    bytes_at_a_time = DEVICE_BLOCK_BYTES
    threads = 1
    if logits_CV.device.type == "cpu":
        bytes_at_a_time = CPU_BLOCK_BYTES
        threads = torch.get_num_threads()
    rows = threads * max(1, bytes_at_a_time // (V * dtype.itemsize))
    scratch_RV = (
        None
        if dtype == logits_CV.dtype
        else logits_CV.new_empty(min(rows, C), V, dtype=dtype)
    )
    for start in range(0, C, rows):
        block_RV = logits_CV[start : start + rows]
        values_RV = (
            block_RV
            if scratch_RV is None
            else scratch_RV[: len(block_RV)].copy_(block_RV)
        )
        losses_C[start : start + rows] = block_gradient_(
            values_RV,
            labels_C[start : start + rows, None],
            objective,
            gradient,
            some_ignored,
        )
        if gradient and values_RV is not block_RV:
            block_RV.copy_(values_RV)


def block_gradient_(
    values_RV: Tensor,
    labels_R1: Tensor,
    objective: Objective,
    gradient: bool,
    some_ignored: bool,
) -> Tensor:
    """Losses of a few rows; replaces their float32 logits by the gradient."""
    smoothing = objective.label_smoothing
    z_loss_coef = objective.z_loss_coef
    ignored_R1 = labels_R1 == IGNORE_INDEX if some_ignored else None
    if ignored_R1 is not None:
        labels_R1 = labels_R1.masked_fill(ignored_R1, 0)
    top_R1 = values_RV.amax(1, keepdim=True)
    label_logit_R1 = values_RV.gather(1, labels_R1)
    mean_R1 = values_RV.mean(1, keepdim=True) if smoothing else None
    softmax_ = softmax_cpu_ if values_RV.device.type == "cpu" else softmax_device_
    log_sum_R1 = softmax_(values_RV, top_R1)
    # Relative to the largest logit, against cancellation.
    losses_R1 = (1 - smoothing) * (top_R1 - label_logit_R1) + log_sum_R1
    if mean_R1 is not None:
        losses_R1 += smoothing * (top_R1 - mean_R1)
    if z_loss_coef:
        logsumexp_R1 = top_R1 + log_sum_R1
        losses_R1 += z_loss_coef * logsumexp_R1.square()
        if gradient:
            values_RV.mul_(1 + 2 * z_loss_coef * logsumexp_R1)
    if gradient:
        if smoothing:
            values_RV.sub_(smoothing / values_RV.shape[1])
        values_RV.scatter_add_(1, labels_R1, torch.full_like(top_R1, smoothing - 1))
        if objective.gradient_scale != 1:
            values_RV.mul_(objective.gradient_scale)
    if ignored_R1 is not None:
        losses_R1.masked_fill_(ignored_R1, 0.0)
        if gradient:
            values_RV.masked_fill_(ignored_R1, 0.0)
    return losses_R1.squeeze(1)


def softmax_cpu_(values_RV: Tensor, top_R1: Tensor) -> Tensor:
    """Softmax in place; returns log(sum(exp(values - top))) of each row.

    torch.softmax on a CPU is a vectorized loop with a last pass element by element, so it may
    write in place. The largest probability is 1 / sum(exp(values - top)), never too small for an
    exact logarithm.
    """
    torch.softmax(values_RV, 1, out=values_RV)
    return -values_RV.amax(1, keepdim=True).log()


def softmax_device_(values_RV: Tensor, top_R1: Tensor) -> Tensor:
    """The same with in-place operators, since in-place ``torch.softmax`` is not safe on every
    device."""
    sum_R1 = values_RV.sub_(top_R1).exp_().sum(1, keepdim=True)
    values_RV.div_(sum_R1)
    return sum_R1.log()


@functools.cache
def _triton_kernel() -> SoftmaxKernel | None:
    """The kernel, if Triton is installed and compiles it: it needs a C compiler, which small images
    lack."""
    try:
        from .softmax_triton import softmax_gradient_

        logits_CV = torch.zeros(1, 2, device="cuda")
        labels_C = torch.zeros(1, dtype=torch.int64, device="cuda")
        softmax_gradient_(
            logits_CV, labels_C, torch.empty(1, device="cuda"), Objective(), True
        )
    except ImportError:
        return None
    except Exception as error:
        warnings.warn(
            (
                "the chunked loss does without its Triton kernel, which does not compile here: "
                f"{error}"
            ),
            stacklevel=2,
        )
        return None
    return softmax_gradient_
