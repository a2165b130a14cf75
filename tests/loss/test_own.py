"""A user's loss: values and gradients of both forms, and losses that would train wrongly."""

import pytest
import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.loss import LossConfig, OwnLoss, build_loss
from fsdptoys.loss.objective import IGNORE_INDEX, Objective
from fsdptoys.loss.probe import check_own_loss
from tests.harness.own_losses import (
    BrokenConfig,
    FocalConfig,
    OwnConfig,
    WholeConfig,
)

N = 50
D = 24
V = 131
FORMS = {
    "plain": (False, None),
    "one chunk": (True, N),
    "chunks": (True, 16),
}


def make_inputs(dtype: torch.dtype, ignored: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype)
    weight_VD = (torch.randn(V, D, generator=generator) * 0.3).to(dtype)
    labels_N = torch.randint(V, (N,), generator=generator)
    labels_N[torch.rand(N, generator=generator) < ignored] = IGNORE_INDEX
    return hidden_ND, weight_VD, labels_N


def outcome(
    config: LossConfig | None,
    form: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    gradient_scale: float = 1.0,
) -> list[Tensor]:
    """Loss and both gradients, where the backward begins with 0.3."""
    chunk_loss, chunk_tokens = FORMS[form]
    hidden_ND, weight_VD = (x.clone().requires_grad_() for x in inputs[:2])
    loss_fn = build_loss(
        chunk_loss,
        chunk_tokens,
        objective=Objective(gradient_scale=gradient_scale),
        own=OwnLoss.of(config) if config else None,
    )
    loss = loss_fn(hidden_ND, weight_VD, inputs[2])
    (loss * 0.3).backward()
    assert hidden_ND.grad is not None and weight_VD.grad is not None
    return [loss.detach(), hidden_ND.grad, weight_VD.grad]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [OwnConfig(), WholeConfig()], ids=["own", "whole"])
def test_own_cross_entropy_equals_the_built_in_one(
    config: LossConfig, form: str
) -> None:
    """Oracle: the built-in loss in the same form, its gradients of the plain form in every bit."""
    inputs = make_inputs(torch.float32, ignored=0.2)
    built_in = outcome(None, "plain" if config.takes_hidden_states else form, inputs)
    own = outcome(config, form, inputs)
    torch.testing.assert_close(own, built_in, rtol=1e-6, atol=1e-6)
    if form == "plain":
        assert torch.equal(own[1], built_in[1]) and torch.equal(own[2], built_in[2])


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("form", FORMS)
def test_focal_loss_has_the_gradients_of_float64(
    form: str, dtype: torch.dtype, tolerance: float, scale: float
) -> None:
    """Oracle: the definition, differentiated by autograd in float64."""
    inputs = make_inputs(dtype, ignored=0.3)
    hidden_ND, weight_VD = (x.double().requires_grad_() for x in inputs[:2])
    valid = inputs[2] != IGNORE_INDEX
    log_probabilities = (hidden_ND[valid] @ weight_VD.t()).log_softmax(1)
    chosen = log_probabilities.gather(1, inputs[2][valid, None])
    loss = ((1 - chosen.exp()) ** 2 * -chosen).sum()
    (loss * 0.3).backward()
    exact = [loss.detach(), hidden_ND.grad, weight_VD.grad]
    for value, expected in zip(
        outcome(FocalConfig(), form, inputs, scale), exact, strict=True
    ):
        assert expected is not None
        error = (value.double() - expected).norm() / expected.norm()
        assert error < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_tokens_without_labels_add_nothing(form: str) -> None:
    """Oracle: zeros, also from a function that fails for the label -100."""
    hidden_ND, weight_VD, labels_N = make_inputs(torch.float32, ignored=0.0)
    nothing = torch.full_like(labels_N, IGNORE_INDEX)
    for value in outcome(FocalConfig(), form, (hidden_ND, weight_VD, nothing)):
        assert torch.equal(value, torch.zeros_like(value))


MISTAKES = {
    "mean": "returned torch.float32 of shape (); return a tensor of 6 losses, one for each token",
    "mixed": "so it would depend on ranks and chunks",
    "detached": "returned a loss without a gradient",
    "infinite": "gives inf for 6 random tokens",
    "by_value": "cannot run on tensors without values",
    "fails": "failed on 6 random tokens (RuntimeError: ",
    "learned": "has parameters, which nothing would train",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_loss_that_would_train_wrongly_is_refused_before_the_start(kind: str) -> None:
    """Oracle: part of the expected sentence."""
    with pytest.raises(ConfigError) as error:
        check_own_loss(BrokenConfig(kind), vocab_size=V)
    assert str(error.value).startswith("loss=broken ")
    assert MISTAKES[kind] in str(error.value)


def test_losses_of_tokens_pass_the_check() -> None:
    """Oracle: no exception."""
    for config in (OwnConfig(), FocalConfig(), WholeConfig()):
        check_own_loss(config, vocab_size=V)
