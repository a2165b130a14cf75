"""The function of the logits to minimize.

For a row of logits x with label y over V classes, with s label smoothing and z the coefficient of
the z-loss::

    (1 - s) · (logsumexp(x) - x[y]) + s · (logsumexp(x) - mean(x)) + z · logsumexp(x)²

Label smoothing (arXiv:1512.00567) is ``F.cross_entropy``'s, spread over all classes including the
label's own. The z-loss keeps the logits from drifting (PaLM, arXiv:2204.02311, which uses 1e-4).
Rows with the label ``IGNORE_INDEX`` count for neither.
"""

from dataclasses import dataclass

IGNORE_INDEX = -100
"""Label of ignored positions, as in ``F.cross_entropy``."""


@dataclass(frozen=True)
class Objective:
    """Cross entropy with label smoothing and z-loss."""

    label_smoothing: float = 0.0
    """Share of each label spread evenly over all classes; at least 0 and below 1."""
    z_loss_coef: float = 0.0
    """Weight of logsumexp(logits)²; at least 0."""
    gradient_scale: float = 1.0
    """Factor on the gradients that the chunked loss keeps until its backward, which divides by it.

    A power of two near the gradient that the backward will receive; in float16 small probabilities
    would become zero. The trainer computes it from all tokens of the global batch, since the number
    of valid ones is on the device. The plain loss has no use for it, since its backward multiplies
    in float32 before it rounds.
    """
