"""PyTorch's fused AdamW on a CPU, rounding every element alike wherever it is in a tensor.

The fused kernel reads parameter, gradient and states once, where PyTorch's default makes ten
passes. Its loop takes full vectors and then the remaining elements one by one, and the compiler
rounds the two differently: the last elements of a shard would depend on where the shard ends. Here
each tensor's full vectors are updated in place, and the remainder in a copy padded to full vectors,
so that bits do not depend on sharding.

Cost: a copy of fewer than ``VECTOR_ELEMENTS`` elements per tensor. Not covered: AMSGrad, and
gradient scalers.
"""

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from .fused_adamw import FusedAdamW

VECTOR_ELEMENTS = 64
"""A multiple of the vector length of any dtype, and of the kernel's split of work among threads."""


class VectorAdamW(FusedAdamW):
    """``torch.optim.AdamW(fused=True)`` for dense parameters on a CPU, DTensors included."""

    @property
    def skips_on_device(self) -> bool:
        """Never: the host reads a flag of the CPU without a wait, and ``VectorUpdate`` pads
        gradients."""
        return False

    def _run(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        updates = VectorUpdate()
        for *tensors, step in zip(params, grads, averages, squares, steps, strict=True):
            updates.add(tensors, step)
        updates.run(group)


class VectorUpdate:
    """One group's tensors, split into full vectors and padded remainders."""

    def __init__(self) -> None:
        self._parts: list[list[Tensor]] = []
        """Parameter, gradient, both moments, step count."""
        self._padded: list[tuple[list[Tensor], list[Tensor]]] = []
        """Remainders and their padded copies."""

    def add(self, tensors: list[Tensor], step: Tensor) -> None:
        """Add one parameter's four tensors, and its step count, which the update increments."""
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
        """Update all with a group's hyperparameters."""
        if not self._parts:
            return
        params, grads, averages, squares, steps = map(list, zip(*self._parts, strict=True))
        beta1, beta2 = group["betas"]
        adamw(
            params, grads, averages, squares, [], steps,
            fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for (param, _, *states), (param_copy, _, *state_copies) in self._padded:
            for view, copy in zip((param, *states), (param_copy, *state_copies), strict=True):
                view.copy_(copy[: view.numel()])
