"""Tensors in the nested inputs and outputs of a forward."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace tensors in nested dicts, lists, tuples and dataclasses; return these if unchanged."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        children = dict(tree)
    elif isinstance(tree, list | tuple):
        children = dict(enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    else:
        return tree
    mapped = {key: map_tensors(value, function) for key, value in children.items()}
    if all(mapped[key] is value for key, value in children.items()):
        return tree
    if isinstance(tree, list | tuple):
        values = mapped.values()
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    copied = copy.copy(tree)  # keeps a dict's class, and fields that no __init__ takes
    for key, value in mapped.items():
        if isinstance(tree, dict):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # the dataclass may be frozen
    return copied


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in a nesting, in order."""
    tensors: list[Tensor] = []
    map_tensors(tree, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors
