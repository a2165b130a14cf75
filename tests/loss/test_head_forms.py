"""The losses of heads with a bias and a soft cap."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.loss import build_loss
from fsdptoys.loss.objective import IGNORE_INDEX, Objective

OBJECTIVES = {
    "cross entropy": Objective(),
    "smoothing and z-loss": Objective(label_smoothing=0.1, z_loss_coef=0.01),
}
FORMS = {"bias": (True, None), "cap": (False, 3.0), "bias and cap": (True, 3.0)}


def plain_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Written out by PyTorch's own functions."""
    logits = F.linear(hidden, weight, bias)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_equal_autograd(
    objective: str, form: str, chunk_tokens: int | None
) -> None:
    """Oracle: F.cross_entropy and logsumexp of the full logits, in float64."""
    has_bias, cap = FORMS[form]
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float64)
    weight = torch.randn(13, 6, dtype=torch.float64)
    bias = torch.randn(13, dtype=torch.float64) if has_bias else None
    labels = torch.randint(13, (10,))
    labels[[0, 7]] = IGNORE_INDEX
    settings = OBJECTIVES[objective]

    def gradients(of_chunks: bool) -> list[Tensor]:
        leaves = [
            None if leaf is None else leaf.clone().requires_grad_()
            for leaf in (hidden, weight, bias)
        ]
        own_hidden, own_weight, own_bias = leaves
        assert own_hidden is not None
        assert own_weight is not None
        if of_chunks:
            loss_fn = build_loss(
                chunk_tokens is not None, chunk_tokens, objective=settings
            )
            further = {"bias_V": own_bias, "softcap": cap}
            loss = loss_fn(own_hidden, own_weight, labels, **further)
        else:
            logits = plain_logits(own_hidden, own_weight, own_bias, cap)
            loss = F.cross_entropy(
                logits,
                labels,
                reduction="sum",
                label_smoothing=settings.label_smoothing,
            )
            squares = logits.logsumexp(1).square()[labels != IGNORE_INDEX]
            loss = loss + settings.z_loss_coef * squares.sum()
        (loss * 2).backward()
        grads = [leaf.grad for leaf in leaves if leaf is not None]
        return [loss.detach().double(), *(grad for grad in grads if grad is not None)]

    for grad, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(grad, expected.to(grad.dtype), rtol=1e-5, atol=1e-5)
