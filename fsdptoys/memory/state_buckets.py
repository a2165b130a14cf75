"""Optimizer states cut into buckets, each updated by PyTorch's own optimizer over views of its parameters.

A bucket holds consecutive parameters of one unit, and their states side by side in one flat tensor, so that a bucket
moves with one copy. An optimizer of the same type as the outer one does the arithmetic, over stand-ins that view the
parameters' local tensors, so that each of PyTorch's implementations gives the bits that it gives without buckets. That
needs an optimizer that works element by element, as AdamW and SGD do; which states one keeps is found by a step on a
stand-in of two numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdptoys.utils.dtensor import (
    is_dtensor,
    local_tensor,
    unwrapped,
)

ALIGNMENT = 64
"""Elements to whose multiples each state's offset is rounded up: where vector loads may start."""

Unit = tuple[nn.Module, list[nn.Parameter]]
"""A module, and the parameters that its forward is the first to need."""


@dataclass(frozen=True)
class StateKinds:
    """What an optimizer keeps for a parameter."""

    tensors: tuple[str, ...]
    """States of the parameter's shape."""
    scalars: dict[str, Tensor]
    """States of one number, with an example of each on the device where the optimizer wants it."""


def state_kinds(optimizer: torch.optim.Optimizer) -> StateKinds:
    """Find out what an optimizer keeps."""
    first = local_tensor(optimizer.param_groups[0]["params"][0])
    stand_in = nn.Parameter(torch.zeros(2, dtype=first.dtype, device=first.device))
    stand_in.grad = torch.zeros_like(stand_in)
    inner = _same_type(optimizer, {0: [stand_in]})
    inner.step()
    kept = {name: value for name, value in inner.state[stand_in].items() if isinstance(value, Tensor)}
    assert all(value.shape in ((), stand_in.shape) for value in kept.values()), "not an element-wise optimizer"
    return StateKinds(
        tensors=tuple(name for name, value in kept.items() if value.ndim),
        scalars={name: value for name, value in kept.items() if not value.ndim},
    )


def _same_type(optimizer: torch.optim.Optimizer, params: dict[int, list[nn.Parameter]]) -> torch.optim.Optimizer:
    kind: Any = type(optimizer)
    groups = [{**_hyperparameters(optimizer.param_groups[index]), "params": params[index]} for index in params]
    made: torch.optim.Optimizer = kind(groups)
    return made


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    # A schedule fills a learning rate that is a tensor in place.
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


class Bucket:
    """Parameters that are updated at a time.

    Args:
        unit: index of the unit that they belong to.
        params: parameters of ``optimizer``.
        optimizer: the outer optimizer, for its type and groups.
        kinds: what it keeps.
    """

    slab: Tensor
    """All states, flat, where they stay between updates."""

    def __init__(
        self, unit: int, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, kinds: StateKinds
    ) -> None:
        self.unit = unit
        self.params = list(params)
        self.on_host = True
        self.stored: Any = None
        """Event of the last copy into ``slab``."""
        locals_ = [local_tensor(param) for param in self.params]
        self._shapes = [local.shape for local in locals_]
        self._kinds = kinds
        self.scalars = [{name: torch.zeros_like(value) for name, value in kinds.scalars.items()} for _ in self.params]
        self.elements = sum(self._state_elements(shape) * len(kinds.tensors) for shape in self._shapes)
        self._stand_ins = [nn.Parameter(torch.empty(0, dtype=local.dtype, device=local.device)) for local in locals_]
        self.gradients: list[Tensor | None] = []
        """Of the parameters, between ``take`` and ``update``."""
        self._scale: Tensor | None = None
        by_group: dict[int, list[nn.Parameter]] = {}
        group_of = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
        for param, stand_in in zip(self.params, self._stand_ins, strict=True):
            by_group.setdefault(group_of[param], []).append(stand_in)
        self._group_indices = list(by_group)
        self._inner = _same_type(optimizer, by_group)
        # An optimizer that counts no steps may treat its first one apart: SGD copies the gradient, and 0.9 · 0 + -0.0
        # would not be -0.0.
        self._without_state = set() if kinds.scalars else set(range(len(self.params)))

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """The states of each parameter, in its local shape, as views into a tensor laid out as ``slab``."""
        views: list[dict[str, Tensor]] = []
        offset = 0
        for shape in self._shapes:
            views.append({})
            for name in self._kinds.tensors:
                views[-1][name] = flat[offset : offset + math.prod(shape)].view(shape)
                offset += self._state_elements(shape)
        return views

    def take(self, groups: list[dict[str, Any]], scale: Tensor | None, release: bool) -> bool:
        """Fix hyperparameters and gradients for the next update; say whether there is any gradient.

        Args:
            groups: the outer optimizer's.
            scale: a factor on the gradients that is still to be applied, on their device.
            release: take the gradients away from the parameters, so that nothing else changes them until the update.
        """
        self.gradients = [param.grad for param in self.params]
        self._scale = scale
        if release:
            for param in self.params:
                param.grad = None
        for inner, index in zip(self._inner.param_groups, self._group_indices, strict=True):
            inner.update(_hyperparameters(groups[index]))
        return any(gradient is not None for gradient in self.gradients)

    @torch.no_grad()
    def update(self, flat: Tensor) -> None:
        """Update the parameters, and their states in ``flat``, from what was taken."""
        views = self.views(flat)
        first = set()
        # The local tensors are looked up anew, since a strategy may have replaced them.
        for index, (param, stand_in) in enumerate(zip(self.params, self._stand_ins, strict=True)):
            gradient = self.gradients[index]
            if gradient is None:
                continue
            stand_in.data = local_tensor(param)
            stand_in.grad = local_tensor(gradient)
            if self._scale is not None:
                stand_in.grad.mul_(self._scale)
            if index in self._without_state:
                first.add(index)
            else:
                self._inner.state[stand_in] = {**self.scalars[index], **views[index]}
        self.gradients = []
        self._inner.step()
        for index in first:
            for name, view in views[index].items():
                view.copy_(self._inner.state[self._stand_ins[index]][name])
        self._without_state -= first
        self._inner.state.clear()
        for stand_in in self._stand_ins:
            stand_in.grad = None

    @torch.no_grad()
    def load(self, index: int, saved: dict[str, Any]) -> None:
        """Copy the states of the parameter numbered ``index``; what is not saved becomes zero, as before any step."""
        kept = {**self.scalars[index], **self.views(self.slab)[index]}
        if any(isinstance(saved.get(name), Tensor) for name in self._kinds.tensors):
            self._without_state.discard(index)
        elif not self._kinds.scalars:
            self._without_state.add(index)
        for name, state in kept.items():
            value = saved.get(name)
            if value is None:
                state.zero_()
            else:
                state.copy_(local_tensor(value) if isinstance(value, Tensor) else torch.tensor(value))

    @staticmethod
    def _state_elements(shape: torch.Size) -> int:
        return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


def cut_buckets(
    optimizer: torch.optim.Optimizer, units: Sequence[Unit], bucket_bytes: int, dtype: torch.dtype
) -> list[Bucket]:
    """Cut the parameters of each unit into buckets, in the order of the units.

    Args:
        optimizer: over all of the units' parameters and no others.
        units: every parameter once.
        bucket_bytes: states of a bucket, at most, unless those of one parameter are more.
        dtype: number format of the states that travel.
    """
    in_units = [param for _, params in units for param in params]
    optimized = {param for group in optimizer.param_groups for param in group["params"]}
    assert len(in_units) == len(set(in_units)) and set(in_units) == optimized, "units must name every parameter once"
    kinds = state_kinds(optimizer)
    buckets: list[Bucket] = []
    for unit, (_, params) in enumerate(units):
        cut: list[list[nn.Parameter]] = []
        size = 0
        for param in params:
            added = local_tensor(param).numel() * len(kinds.tensors) * dtype.itemsize
            if not cut or size + added > bucket_bytes:
                cut.append([])
                size = 0
            cut[-1].append(param)
            size += added
        buckets += [Bucket(unit, members, optimizer, kinds) for members in cut]
    return buckets


@torch.no_grad()
def sharded_like(param: Tensor, local: Tensor) -> Tensor:
    """``local`` itself, or where ``param`` is a DTensor, a DTensor laid out likewise whose local part is ``local``.

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    if not is_dtensor(param):
        return local
    made = torch.empty_like(unwrapped(param), dtype=local.dtype, device=local.device)
    assert is_dtensor(made)
    made.to_local().set_(local)  # type: ignore[call-overload]
    assert made.to_local().data_ptr() == local.data_ptr() and made.to_local().device == local.device
    return made
