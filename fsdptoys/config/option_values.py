"""Values of configuration keys: their types, the likely meaning of a value of the wrong type, and
example values.

Independent of Hydra and of the names of the keys, except for ``SWITCHED_CHOICES``.
"""

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from fsdptoys.utils.bounds import Bounds
from fsdptoys.utils.text import near_miss, value_text

SWITCHES = {
    **dict.fromkeys(["true", "yes", "y", "on", "1", "enable", "enabled"], "true"),
    **dict.fromkeys(["false", "no", "n", "off", "0", "disable", "disabled"], "false"),
}
"""Spellings of booleans → their value."""

SWITCHED_CHOICES = {
    "memory.gradient_checkpointing": {"true": "full", "false": "none"},
    "train.deterministic": {"true": "true", "false": "false"},
}
"""Key with choices that also takes a boolean → boolean → its choice."""

SYNONYMS = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "fp16": "float16",
}
SYNONYMS |= {"fp64": "float64"}
"""Common synonyms of choices, too different in spelling for a closest match → the choice."""

OFF = (None, "none", "never", "disabled")
"""Choices that switch something off."""


class Option(NamedTuple):
    """A configuration key."""

    annotation: Any
    default: Any  # In its dataclass; ``dataclasses.MISSING`` if it has none
    bounds: Bounds = Bounds()

    @property
    def nullable(self) -> bool:
        """Whether null is a value."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def base_type(self) -> Any:
        """The annotation without None."""
        if self.nullable:
            (base_type,) = (
                part
                for part in typing.get_args(self.annotation)
                if part is not type(None)
            )
            return base_type
        # An integer or a word is declared as Any, since OmegaConf does not support this union.
        return (
            int | str
            if self.annotation is Any and isinstance(self.default, int)
            else self.annotation
        )


def read_value(key: str, value: Any) -> Any:
    """Return the choice that a boolean, or a spelling of one, means for ``key``; other values
    unchanged."""
    return SWITCHED_CHOICES.get(key, {}).get(
        SWITCHES.get(str(value).strip().lower(), ""), value
    )


def mismatch(option: Option, value: Any, raw: str) -> tuple[str | None, str | None]:
    """Return the expected kind of value (None if it matches) and a corrected value (None if there
    is no guess)."""
    base_type = option.base_type
    if value is None and option.nullable:
        return None, None
    word = str(value).strip().lower()
    if base_type is bool:
        return (None if isinstance(value, bool) else "true or false"), SWITCHES.get(
            word
        )
    if base_type in (int, float):
        if _is_item(value, base_type):
            return None, None
        number = _intended_number(value)
        corrected = (
            None
            if number is None
            else str(round(number) if base_type is int else number)
        )
        return "an integer" if base_type is int else "a finite number", corrected
    if isinstance(base_type, type) and issubclass(base_type, Enum):
        names = [member.name for member in base_type]
        corrected = SYNONYMS[word] if SYNONYMS.get(word) in names else None
        if word not in SWITCHES:
            corrected = corrected or near_miss(word, names)
        return (None if value in names else one_of(names)), corrected
    if typing.get_origin(base_type) is list:
        (kind,) = typing.get_args(base_type)
        if isinstance(value, list) and all(_is_item(item, kind) for item in value):
            return None, None
        corrected = f"[{raw}]" if _is_item(value, kind) else None
        return {int: "a list of integers", float: "a list of finite numbers"}.get(
            kind, "a list"
        ), corrected
    if base_type == int | str:  # the dataclass checks the words themselves
        return (
            None
            if isinstance(value, str) or type(value) is int
            else "an integer or a word"
        ), None
    if base_type is Any:  # one word, or several
        items = value if isinstance(value, list) else [value]
        return (
            None
            if all(isinstance(word, str) for word in items)
            else "a word or a list of words"
        ), None
    assert base_type is str, f"no option may have the type {base_type}"
    return (
        None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
        else "text"
    ), None


def _intended_number(value: Any) -> int | float | None:
    """The finite number most likely meant by quoted text, another base or another numeric type;
    None if unclear."""
    for read in (
        (functools.partial(int, base=0), int, float) if isinstance(value, str) else ()
    ):
        with contextlib.suppress(ValueError):
            return _intended_number(read(value.strip()))
    return value if _is_item(value, float) else None


def _is_item(value: Any, kind: type) -> bool:
    if kind is float:
        with contextlib.suppress(OverflowError):  # integers too large for a float
            return type(value) in (int, float) and math.isfinite(value)
        return False
    return type(value) is int if kind is int else isinstance(value, (str, int, float))


def example(key: str, option: Option, state: str = "") -> str:
    """``key=value`` with the default, or with one that switches on (``state="true"``) or off
    (``"false"``)."""
    base_type = option.base_type
    default = option.default
    value = getattr(default, "value", default)
    if option.bounds.other is not None and value == option.bounds.other:
        value = 8  # the default leaves the choice to the program, and is no example
    if base_type is bool and state:
        value = state == "true"
    elif isinstance(base_type, type) and issubclass(base_type, Enum) and state:
        names = [value, *(member.name for member in base_type)]
        value = next(
            (
                name
                for name in names
                if (name in OFF) == (state == "false") and name is not None
            ),
            value,
        )
    elif state == "false":
        value = (
            None
            if option.nullable
            else 0
            if base_type in (int, float) and option.bounds.holds(0)
            else default
        )
        value = [] if base_type is Any else value
    elif state == "true" and not default and base_type in (int, float):
        value = next(
            (number for number in (1, 0.1, 2) if option.bounds.holds(number)), default
        )
    elif state == "true" and (
        default is None or (isinstance(default, str) and " " in default)
    ):
        value = "VALUE"
    return f"{key}={'VALUE' if default is dataclasses.MISSING else value_text(value, quote=True)}"


def one_of(names: Sequence[str]) -> str:
    """The names, for a sentence."""
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
