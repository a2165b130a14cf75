"""Dataclasses made of plain values that someone else may have written, checked against their annotations.

Understood are ``bool``, ``int``, ``float``, ``str``, ``Any``, enums by value, dataclasses, ``X | None``, lists, tuples
of one kind and dicts. Ints have 64 bits and floats are finite, so that arithmetic on them cannot overflow. What one
reader alone knows, as that a duration is above 0, it checks itself.
"""

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from .foreign import ForeignError
from .text import one_line

LARGEST_INTEGER = 2**63 - 1

T = TypeVar("T")


def build(kind: type[T], tree: Any, name: str = "it") -> T:
    """A dataclass out of a mapping.

    Args:
        kind: the dataclass.
        tree: field → plain value.
        name: of the mapping, for sentences.

    Raises:
        ForeignError: if the mapping is none, lacks a field without default, has a key that is no field, or a value
            that is not of its field's kind.
    """
    if not isinstance(tree, dict):
        raise ForeignError(f"{name} is {shown(tree)}, which must be a mapping")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    unknown = next((key for key in tree if key not in fields), None)
    if unknown is not None:
        raise ForeignError(f"{name} has the key {shown(unknown)}, which is not one of this version")
    values, hints = {}, _hints(kind)  # type: ignore[arg-type]  # a class has a hash
    for key, field in fields.items():
        if key in tree:
            values[key] = typed(hints[key], tree[key], key if name == "it" else f"{name}.{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ForeignError(f"{name} lacks the key {key}")
    return kind(**values)


def typed(kind: Any, value: Any, name: str) -> Any:
    """A value of an annotation's kind; lists become tuples where the annotation is one, ints floats likewise.

    Raises:
        ForeignError: if it is of another kind or out of range.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        others = [each for each in arguments if each is not type(None)]
        for each in others[:-1]:
            try:
                return typed(each, value, name)
            except ForeignError:
                continue
        return typed(others[-1], value, name)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        parts = [typed(arguments[0], each, f"{name}[{index}]") for index, each in enumerate(value)]
        return parts if origin is list else tuple(parts)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {
            typed(arguments[0], key, f"a key of {name}"): typed(arguments[1], each, f"{name}.{key}")
            for key, each in value.items()
        }
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return build(kind, value, name)
        if issubclass(kind, Enum):
            found = next((each for each in kind if each.value == value and type(each.value) is type(value)), None)
            if found is not None:
                return found
        elif kind is float:
            if math.isfinite(value) if type(value) is float else _is_integer(value):
                return float(value)
        elif type(value) is kind if kind is not int else _is_integer(value):
            return value
    raise ForeignError(f"{one_line(name)} is {shown(value)}, which cannot be")


def shown(value: object) -> str:
    """A foreign value for a sentence: short, on one line."""
    return one_line(reprlib.repr(value))


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INTEGER


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
