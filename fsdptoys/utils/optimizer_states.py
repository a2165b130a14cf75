"""The states that an optimizer keeps for a parameter."""

from typing import Any

import torch
from torch import Tensor, nn

from .dtensor import local_tensor


def same_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Construct an optimizer of the same class and settings over other parameters.

    The constructor of a class of own code may need more than the groups, or keep settings outside
    of them. Its attributes are taken over instead.
    """
    kind: Any = type(optimizer)
    inner: torch.optim.Optimizer
    if kind.__module__.startswith(("torch.", "fsdptoys.")):
        inner = kind(groups)
        return inner
    inner = kind.__new__(kind)
    torch.optim.Optimizer.__init__(inner, groups, optimizer.defaults)
    for name, value in vars(optimizer).items():
        if name not in vars(inner):
            setattr(inner, name, value)
    return inner


def kept_states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an example of each state by its name, from a step on two numbers."""
    group = optimizer.param_groups[0]
    first = local_tensor(group["params"][0])
    proxy = nn.Parameter(torch.zeros(2, dtype=first.dtype, device=first.device))
    proxy.grad = torch.zeros_like(proxy)
    inner = same_optimizer(optimizer, [{**group, "params": [proxy]}])
    inner.step()
    return {
        name: value
        for name, value in inner.state[proxy].items()
        if isinstance(value, Tensor)
    }
