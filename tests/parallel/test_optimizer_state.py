"""The state of an optimizer that has taken no step."""

import numpy
import pytest
import torch

from fsdptoys.parallel.state import State


@pytest.mark.parametrize("kept", ["adamw", "adamw fused", "sgd", "sgd without momentum"])
def test_saving_an_optimizer_before_its_first_step_does_not_change_that_step(kept: str) -> None:
    """Oracle: an unsaved optimizer; bits, since 0.0 + -0.0 is not -0.0; the keys equal those after
    a step.
    """

    def make() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        params = [
            {"params": [param], "weight_decay": decay}
            for param, decay in zip(model.parameters(), (0.1, 0.0), strict=True)
        ]
        if kept.startswith("sgd"):
            return model, torch.optim.SGD(params, lr=0.1, momentum=0.9 if kept == "sgd" else 0.0)
        return model, torch.optim.AdamW(params, lr=0.1, fused="fused" in kept or None)

    def step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, numpy.ndarray]:
        for param in model.parameters():
            param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
            param.grad.view(-1)[0] = -0.0
        optimizer.step()
        tensors = State(model.named_parameters, optimizer).tensors()
        return {name: tensor.numpy().copy() for name, tensor in tensors.items()}

    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = State(model.named_parameters, optimizer).tensors()
    assert all(torch.equal(first[f"model.{name}"], value) for name, value in before.items())
    assert not any(tensor.any() for name, tensor in first.items() if name.startswith("optim."))
    keys = set(first)
    got, expected = step(model, optimizer), step(*make())
    assert keys == set(got) == set(expected)
    assert all(got[name].tobytes() == expected[name].tobytes() for name in keys)
