"""The states that an optimizer keeps for a parameter."""

from typing import Any

import torch
from torch import Tensor, nn

from .dtensor import local_tensor


def kept_states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an example of each state by its name, from a step on two numbers."""
    group = optimizer.param_groups[0]
    first = local_tensor(group["params"][0])
    proxy = nn.Parameter(torch.zeros(2, dtype=first.dtype, device=first.device))
    proxy.grad = torch.zeros_like(proxy)
    kind: Any = type(optimizer)
    inner = kind([{**group, "params": [proxy]}])
    inner.step()
    return {
        name: value
        for name, value in inner.state[proxy].items()
        if isinstance(value, Tensor)
    }
