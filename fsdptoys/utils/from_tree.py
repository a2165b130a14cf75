"""Dataclasses built from foreign plain values (JSON, YAML), checked against annotations and
``bounds`` metadata.

Supported annotations: ``bool``, ``int``, ``float``, ``str``, ``Any``, enums by value, dataclasses,
``X | None``, lists, tuples of one type and dicts. Integers have 64 bits and floats are finite, so
that arithmetic on them cannot overflow. Checks across fields belong in ``__post_init__`` of the
dataclass or in the caller.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from .bounds import Bounds, bounds_of
from .foreign import ForeignError
from .text import one_line, short_text

LARGEST_INTEGER = 2**63 - 1

T = TypeVar("T")


class _Options(NamedTuple):
    skip_unknown: bool = False
    complete: bool = False


def look_up(tree: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dicts; None if it is missing."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def build(
    kind: type[T],
    tree: Any,
    name: str = "",
    *,
    names: Mapping[str, str] | None = None,
    skip_unknown: bool = False,
    complete: bool = False,
) -> T:
    """Build a dataclass from a mapping.

    Args:
        kind: the dataclass.
        tree: field → plain value.
        name: the mapping's name in messages.
        names: fields' names in messages, if others.
        skip_unknown: ignore unknown keys, which a later version may have added, instead of raising
            an error.
        complete: require fields with defaults, too, except those with the metadata ``later``, which
            files of earlier versions lack.

    Raises:
        ForeignError: if ``tree`` is no mapping, lacks a required field, or has an unknown key or a
            value of the wrong type or out of range.
    """
    if not isinstance(tree, dict):
        raise ForeignError(f"{name or 'it'} is {short_text(tree)}, not a mapping")
    all_fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    fields = {field.name: field for field in all_fields if field.init}
    unknown = next((key for key in tree if key not in fields), None)
    if unknown is not None and not skip_unknown:
        raise ForeignError(
            f"{name or 'it'} has the key {short_text(unknown)}, which this version does not read"
        )
    hints = _hints(kind)  # type: ignore[arg-type]  # a class has a hash
    values = {}
    for key, field in fields.items():
        label = names.get(key, key) if names else key
        full_name = f"{name}.{label}" if name else label
        if key in tree:
            values[key] = _convert(
                hints[key],
                tree[key],
                full_name,
                bounds_of(field),
                _Options(skip_unknown, complete),
            )
        elif (complete and not field.metadata.get("later")) or (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise ForeignError(f"{full_name} is missing")
    return kind(**values)


def convert(kind: Any, value: Any, name: str) -> Any:
    """Convert a value to an annotation's type; lists may become tuples, and integers floats.
    ForeignError otherwise."""
    return _convert(kind, value, name, Bounds(), _Options())


def _convert(
    kind: Any, value: Any, name: str, bounds: Bounds, options: _Options
) -> Any:
    inner = functools.partial(
        _convert, bounds=bounds._replace(longest=math.inf), options=options
    )
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        others = [element for element in arguments if element is not type(None)]
        for element in others[:-1]:
            try:
                return _convert(element, value, name, bounds, options)
            except ForeignError:
                continue
        return _convert(others[-1], value, name, bounds, options)
    if (
        origin in (list, tuple)
        and isinstance(value, (list, tuple))
        and len(value) <= bounds.longest
    ):
        parts = [
            inner(arguments[0], element, f"{name}[{index}]")
            for index, element in enumerate(value)
        ]
        return parts if origin is list else tuple(parts)
    if (
        origin in (dict, Mapping)
        and isinstance(value, dict)
        and len(value) <= bounds.longest
    ):
        return {
            convert(arguments[0], key, f"a key of {name}"): inner(
                arguments[1], element, f"{name}.{key}"
            )
            for key, element in value.items()
        }
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return (
            value
            if isinstance(value, kind)
            else build(kind, value, name, **options._asdict())
        )
    if origin is None and issubclass(kind, Enum):
        member = next(
            (
                element
                for element in kind
                if element.value == value and type(element.value) is type(value)
            ),
            None,
        )
        if member is not None:
            return member
    elif kind is int and _is_integer(value) and bounds.holds(value):
        return value
    elif kind is float and (
        math.isfinite(value) if type(value) is float else _is_integer(value)
    ):
        if bounds.holds(value):
            return float(value)
    elif kind is str and isinstance(value, str):
        if bounds.longest == math.inf or (
            len(value) <= bounds.longest and value.isprintable()
        ):
            return value
    elif kind is bool and isinstance(value, bool):
        return value
    raise ForeignError(
        f"{one_line(name)} is {short_text(value)}, not {_describe(kind, bounds)}"
    )


def _describe(kind: Any, bounds: Bounds) -> str:
    """Return a description of the values allowed by an annotation and its bounds."""
    most = "" if bounds.longest == math.inf else f" of at most {bounds.longest}"
    origin = typing.get_origin(kind) or kind
    if origin in (list, tuple):
        return f"a list{most}"
    if origin in (dict, Mapping):
        return f"a mapping{most}"
    if kind is str:
        return f"a line{most} printable characters" if most else "text"
    if kind is bool:
        return "true or false"
    if issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    noun = "an integer" if kind is int else "a finite number"
    if bounds.above or bounds.below or bounds.other is not None:
        return f"{noun} {bounds}"
    if bounds.most < math.inf:
        return f"{noun} from {bounds.least} to {bounds.most}"
    return f"{noun} of at least {bounds.least}" if bounds.least > -math.inf else noun


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INTEGER


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
