"""Tensors within whatever a forward takes and returns."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists, tuples and dataclasses, in their order.

    Returns:
        The same nesting; what holds no tensor that changed is given back as it is.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = {key: map_tensors(function, value) for key, value in tree.items()}
        if all(mapped[key] is value for key, value in tree.items()):
            return tree
        made = copy.copy(tree)  # a subclass of dict stays one
        for key, value in mapped.items():
            made[key] = value
        return made
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            each.name: map_tensors(function, getattr(tree, each.name)) for each in dataclasses.fields(tree) if each.init
        }
        if all(value is getattr(tree, name) for name, value in changes.items()):
            return tree
        return dataclasses.replace(tree, **changes)
    return tree


def with_gradient(tree: Any) -> list[Tensor]:
    """Every tensor in it that takes part in the backward."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, tree)
    return found


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast every tensor of floating point; None leaves all as they are."""
    if dtype is None:
        return tree
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def set_storage(tensor: Tensor, allocated: bool) -> None:
    """Give a tensor its memory, without values, or take it away; whoever holds a view of it sees the same memory."""
    size = tensor.numel() * tensor.element_size() if allocated else 0
    storage = tensor.untyped_storage()
    if storage.size() != size:
        storage.resize_(size)
