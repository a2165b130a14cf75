"""Optimizer states in buckets, each updated by PyTorch's own optimizer over views of its
parameters.

A bucket holds consecutive parameters of one unit, with their states in one flat tensor, so that one
copy moves it. An optimizer of the outer one's type does the arithmetic, over proxies that view the
parameters' local tensors: each of PyTorch's implementations gives the same bits as without buckets.
This needs an element-wise optimizer, such as AdamW or SGD; a step on a proxy of two numbers shows
its states.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.optimizer_states import kept_states, same_optimizer

from .optimizer_stepper import BeforeUpdate

ALIGNMENT = 64
"""Each state's offset is a multiple of so many elements, for aligned vector loads."""

UnitParams = tuple[nn.Module, list[nn.Parameter]]
"""A module, and the parameters that its forward is the first to need."""


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    # A schedule writes to a learning-rate tensor in place.
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class Bucket:
    """Parameters of unit number ``unit`` that are updated together; ``optimizer`` is the outer one.

    An example of a state has several numbers for the parameter's shape, or one number.
    """

    slab: Tensor
    """All states, flat, in the memory where they stay between updates."""

    def __init__(
        self,
        unit: int,
        params: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        examples: dict[str, Tensor],
    ) -> None:
        self.unit = unit
        self.params = list(params)
        self.on_host = True
        self.stored: Any = None
        """Event of the last copy into ``slab``."""
        locals_ = [local_tensor(param) for param in self.params]
        self._shapes = [local.shape for local in locals_]
        self._tensors = [name for name, example in examples.items() if example.ndim]
        scalars = {
            name: example for name, example in examples.items() if not example.ndim
        }
        self.scalars = [
            {name: torch.zeros_like(value) for name, value in scalars.items()}
            for _ in self.params
        ]
        self.elements = sum(
            self._state_elements(shape) * len(self._tensors) for shape in self._shapes
        )
        self._proxies = [
            nn.Parameter(torch.empty(0, dtype=local.dtype, device=local.device))
            for local in locals_
        ]
        self.gradients: list[Tensor | None] = []
        """Gradients of the parameters, between ``take`` and ``update``."""
        self.before_update: list[BeforeUpdate] = []
        self._scale: Tensor | None = None
        by_group: dict[int, list[nn.Parameter]] = {}
        group_of = {
            param: index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        for param, proxy in zip(self.params, self._proxies, strict=True):
            by_group.setdefault(group_of[param], []).append(proxy)
        self._group_indices = list(by_group)
        groups = [
            {**_hyperparameters(optimizer.param_groups[index]), "params": proxies}
            for index, proxies in by_group.items()
        ]
        self._inner = same_optimizer(optimizer, groups)
        # An optimizer without a step counter may treat its first step differently: SGD copies the
        # gradient, while 0.9 · 0 + -0.0 would not be -0.0.
        self._without_state = set() if scalars else set(range(len(self.params)))

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """States of each parameter, in its local shape, as views into a tensor with the layout of
        ``slab``."""
        views: list[dict[str, Tensor]] = []
        offset = 0
        for shape in self._shapes:
            views.append({})
            for name in self._tensors:
                views[-1][name] = flat[offset : offset + math.prod(shape)].view(shape)
                offset += self._state_elements(shape)
        return views

    def take(
        self, groups: list[dict[str, Any]], scale: Tensor | None, release: bool
    ) -> bool:
        """Fix hyperparameters and gradients for the next update; returns whether there is any
        gradient.

        The update multiplies the gradients by ``scale``. ``release`` sets ``param.grad`` to None,
        so that nothing else changes them until then.
        """
        self.gradients = [param.grad for param in self.params]
        self._scale = scale
        if release:
            for param in self.params:
                param.grad = None
        for inner, index in zip(
            self._inner.param_groups, self._group_indices, strict=True
        ):
            inner.update(_hyperparameters(groups[index]))
        return any(gradient is not None for gradient in self.gradients)

    @torch.no_grad()
    def update(self, flat: Tensor) -> None:
        """Update the parameters, and their states in ``flat``, with the taken gradients."""
        views = self.views(flat)
        first = set()
        # A strategy may have replaced the local tensors since the last update.
        for index, (param, proxy) in enumerate(
            zip(self.params, self._proxies, strict=True)
        ):
            gradient = self.gradients[index]
            if gradient is None:
                continue
            proxy.data = local_tensor(param)
            proxy.grad = local_tensor(gradient)
            if self._scale is not None:
                proxy.grad.mul_(self._scale)
            for hook in self.before_update:
                hook(param, gradient)
            if index in self._without_state:
                first.add(index)
            else:
                self._inner.state[proxy] = {**self.scalars[index], **views[index]}
        self.gradients = []
        self._inner.step()
        for index in first:
            for name, view in views[index].items():
                view.copy_(self._inner.state[self._proxies[index]][name])
        self._without_state -= first
        self._inner.state.clear()
        for proxy in self._proxies:
            proxy.grad = None

    @torch.no_grad()
    def load(self, index: int, saved: dict[str, Any]) -> None:
        """Copy the states of parameter ``index``; missing ones become zero, as before the first
        step."""
        states = {**self.scalars[index], **self.views(self.slab)[index]}
        if any(isinstance(saved.get(name), Tensor) for name in self._tensors):
            self._without_state.discard(index)
        elif not self.scalars[index]:
            self._without_state.add(index)
        for name, state in states.items():
            value = saved.get(name)
            if value is None:
                state.zero_()
            else:
                state.copy_(
                    local_tensor(value)
                    if isinstance(value, Tensor)
                    else torch.tensor(value)
                )

    @staticmethod
    def _state_elements(shape: torch.Size) -> int:
        return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


def make_buckets(
    optimizer: torch.optim.Optimizer,
    units: Sequence[UnitParams],
    bucket_bytes: int,
    dtype: torch.dtype,
) -> list[Bucket]:
    """Split the parameters of each unit, which are the optimizer's, into buckets, in the order of
    the units.

    ``bucket_bytes`` limits a bucket's states in ``dtype``, unless one parameter has more.
    """
    in_units = [param for _, params in units for param in params]
    optimized = {param for group in optimizer.param_groups for param in group["params"]}
    assert len(in_units) == len(set(in_units)) and set(in_units) == optimized, (
        "units must name every parameter once"
    )
    examples = kept_states(optimizer)
    assert all(
        example.ndim == 0 or example.numel() == 2 for example in examples.values()
    ), "not an element-wise optimizer"
    state_bytes = dtype.itemsize * sum(
        example.ndim > 0 for example in examples.values()
    )
    buckets: list[Bucket] = []
    for unit, (_, params) in enumerate(units):
        groups: list[list[nn.Parameter]] = []
        size = 0
        for param in params:
            added = local_tensor(param).numel() * state_bytes
            if not groups or size + added > bucket_bytes:
                groups.append([])
                size = 0
            groups[-1].append(param)
            size += added
        buckets += [Bucket(unit, group, optimizer, examples) for group in groups]
    return buckets
