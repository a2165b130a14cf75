"""The state of an optimizer that has taken no step."""

import pytest
import torch
from torch import nn

from fsdptoys.parallel.state import State


def step_after_saving(kind: str, saves: bool) -> dict[str, bytes]:
    """Return the tensors after a first step, before which they may have been saved."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    params = [
        {"params": [param], "weight_decay": decay}
        for param, decay in zip(model.parameters(), (0.1, 0.0), strict=True)
    ]
    optimizer: torch.optim.Optimizer
    if kind.startswith("sgd"):
        optimizer = torch.optim.SGD(
            params, lr=0.1, momentum=0.9 if kind == "sgd" else 0.0
        )
    else:
        optimizer = torch.optim.AdamW(params, lr=0.1, fused="fused" in kind or None)
    if saves:
        saved = State(model.named_parameters, optimizer).tensors()
        assert not any(
            tensor.any() for name, tensor in saved.items() if name.startswith("optim.")
        )
    for param in model.parameters():
        param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
        param.grad.view(-1)[0] = -0.0
    optimizer.step()
    tensors = State(model.named_parameters, optimizer).tensors()
    assert not saves or tensors.keys() == saved.keys()
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "kind", ["adamw", "adamw fused", "sgd", "sgd without momentum"]
)
def test_saving_an_optimizer_before_its_first_step_does_not_change_that_step(
    kind: str,
) -> None:
    """Oracle: an unsaved optimizer; bits, since 0.0 + -0.0 is not -0.0."""
    assert step_after_saving(kind, True) == step_after_saving(kind, False)
