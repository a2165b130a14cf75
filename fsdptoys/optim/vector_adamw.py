"""PyTorch's fused AdamW on a CPU, with every element rounded alike wherever it lies in a tensor.

The fused kernel goes over parameter, gradient and states once, where PyTorch's default makes ten passes. Its loop takes
whole vectors and then what is left of a tensor one by one, and the compiler rounds the two differently: the last
elements of a shard would depend on where the shard ends. Here each tensor's whole vectors are updated in place, and
what is left in a copy that is padded to whole vectors: sharded or not, the bits are the same.

It costs a copy of fewer than ``VECTOR_ELEMENTS`` elements for each tensor that needs it. Left out: AMSGrad, and
gradient scalers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from fsdptoys.utils.dtensor import (
    local_tensor,
)

VECTOR_ELEMENTS = 64
"""A multiple of what a vector holds in any number format, and of where the kernel divides its work among threads."""


class VectorAdamW(AdamW):
    """``torch.optim.AdamW(fused=True)`` for dense parameters on a CPU, DTensors included."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            updates = Updates()
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                tensors = [local_tensor(each) for each in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])]
                updates.add(tensors, state["step"])
            updates.run(group)
        return loss


class Updates:
    """One group's tensors, cut where their whole vectors end."""

    def __init__(self) -> None:
        self._parts: list[list[Tensor]] = []
        """Parameter, gradient, both averages, number of steps."""
        self._padded: list[tuple[list[Tensor], list[Tensor]]] = []
        """Views that were copied, and their copies."""

    def add(self, tensors: list[Tensor], step: Tensor) -> None:
        """One parameter's four tensors, and its number of steps, which the update raises."""
        flat = [each.reshape(-1) if each is tensors[1] else each.view(-1) for each in tensors]
        whole = flat[0].numel() // VECTOR_ELEMENTS * VECTOR_ELEMENTS
        if whole < flat[0].numel() or whole == 0:
            views = [each[whole:] for each in flat]
            copies = [each.new_zeros(VECTOR_ELEMENTS) for each in views]
            for copy, view in zip(copies, views, strict=True):
                copy[: view.numel()] = view
            self._padded.append((views, copies))
            self._parts.append([*copies, step.clone() if whole else step])
        if whole:
            self._parts.append([*(each[:whole] for each in flat), step])

    def run(self, group: dict[str, Any]) -> None:
        """Update them with a group's hyperparameters."""
        if not self._parts:
            return
        params, grads, averages, squares, steps = map(list, zip(*self._parts, strict=True))
        beta1, beta2 = group["betas"]
        adamw(
            params, grads, averages, squares, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for (param, _, *states), (param_copy, _, *state_copies) in self._padded:
            for view, copy in zip((param, *states), (param_copy, *state_copies), strict=True):
                view.copy_(copy[: view.numel()])
