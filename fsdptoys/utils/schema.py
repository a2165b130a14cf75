"""Checks of values that come from JSON: type and range of each, with an error that names the key.

A check is called with a value and its key, returns nothing, and raises ``SchemaError`` for the first mistake. They nest
as the value does. Keys that no check knows are left alone, so that a newer version may add some.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from .text import one_line

Check = Callable[[Any, str], None]

LARGEST = 2**63 - 1

LONGEST_WORD = 1000

LONGEST_SHOWN = 60


class SchemaError(ValueError):
    """A value of another type or range; the message is one line: ``numpy.position is 625, not an integer of …``."""


def integer(low: int = 0, high: int = LARGEST) -> Check:
    """An integer, which true and false are not."""

    def check(value: Any, key: str) -> None:
        if type(value) is not int or not low <= value <= high:
            wanted = f"an integer of at least {low}" if high == LARGEST else f"an integer of {low} to {high}"
            raise SchemaError(_mistake(key, value, wanted))

    return check


def number() -> Check:
    """A number that a float holds and that is finite."""

    def check(value: Any, key: str) -> None:
        if not ((type(value) is int and abs(value) <= LARGEST) or (type(value) is float and math.isfinite(value))):
            raise SchemaError(_mistake(key, value, "a finite number"))

    return check


def flag() -> Check:
    """True or false."""

    def check(value: Any, key: str) -> None:
        if type(value) is not bool:
            raise SchemaError(_mistake(key, value, "true or false"))

    return check


def word(longest: int = LONGEST_WORD) -> Check:
    """A line of text without control characters, which may be printed."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise SchemaError(_mistake(key, value, f"a line of at most {longest} printable characters"))

    return check


def nullable(inner: Check) -> Check:
    """Null, or what another check takes."""

    def check(value: Any, key: str) -> None:
        if value is not None:
            inner(value, key)

    return check


def array(inner: Check, shortest: int, longest: int) -> Check:
    """A list whose every element another check takes."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            count = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
            raise SchemaError(_mistake(key, value, f"a list of {count}"))
        for index, element in enumerate(value):
            inner(element, f"{key}[{index}]")

    return check


def table(inner: Check, longest: int) -> Check:
    """An object with any keys, whose every value another check takes."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, dict) or len(value) > longest:
            raise SchemaError(_mistake(key, value, f"an object of at most {longest} keys"))
        for name, entry in value.items():
            inner(entry, _below(key, name))

    return check


def record(required: Mapping[str, Check], optional: "Mapping[str, Check] | None" = None) -> Check:
    """An object with keys of its own, each with a check."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, dict):
            raise SchemaError(_mistake(key, value, "an object"))
        for name, inner in required.items():
            if name not in value:
                raise SchemaError(f"{_below(key, name)} is missing")
            inner(value[name], _below(key, name))
        for name, inner in (optional or {}).items():
            if name in value:
                inner(value[name], _below(key, name))

    return check


def _below(key: str, name: str) -> str:
    return one_line(f"{key}.{name}" if key else name)


def _mistake(key: str, value: Any, wanted: str) -> str:
    return f"{key or 'it'} is {_shown(value)}, not {wanted}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"
    return one_line(f"{value!r:.{LONGEST_SHOWN}}")
