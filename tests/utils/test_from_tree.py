"""Dataclasses built from foreign plain values."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import build


class Color(Enum):
    """An enum of two values."""

    red = "red"
    one = 1


@dataclass(frozen=True)
class Inner:
    """A nested dataclass."""

    value: float


@dataclass(frozen=True)
class Outer:
    """A dataclass with one field of each kind."""

    number: int
    words: tuple[str, ...]
    inner: Inner
    color: Color = Color.red
    maybe: float | None = None
    sizes: dict[Color, int] = field(default_factory=dict)
    flag: bool = False
    anything: Any = None
    parts: list[Inner] = field(default_factory=list)


WHOLE = {"number": 1, "words": ["a"], "inner": {"value": 2}}


def test_plain_values_are_converted_to_the_annotated_types() -> None:
    """Oracle: the same object, built by hand."""
    tree = {
        **WHOLE,
        "color": 1,
        "maybe": 3,
        "sizes": {"red": 4},
        "flag": True,
        "anything": [[]],
        "parts": [{"value": 1.5}],
    }
    assert build(Outer, tree) == Outer(1, ("a",), Inner(2.0), Color.one, 3.0, {Color.red: 4}, True, [[]], [Inner(1.5)])
    assert build(Outer, WHOLE) == Outer(1, ("a",), Inner(2.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "number is true"),
        ({"number": 1.0}, "number is 1.0"),
        ({"number": 2**63}, "number is 9223372036854775808"),
        ({"number": None}, "number is null"),
        ({"words": "ab"}, "words is 'ab'"),
        ({"words": ["a", 1]}, "words[1] is 1"),
        ({"inner": {"value": float("inf")}}, "inner.value is inf"),
        ({"inner": {"value": 10**400}}, "inner.value is 1"),
        ({"inner": {}}, "inner.value is missing"),
        ({"inner": []}, "inner is [], not a mapping"),
        ({"color": True}, "color is true"),
        ({"color": []}, "color is []"),
        ({"sizes": {"blue": 1}}, "a key of sizes is 'blue'"),
        ({"sizes": {"red": "\x1b[2J"}}, "sizes.red is '\\x1b[2J'"),
        ({"flag": 1}, "flag is 1"),
        ({"\x1b": 1}, "the key '\\x1b'"),
    ],
)
def test_values_of_the_wrong_type_are_named(change: dict[str, Any], reason: str) -> None:
    """Oracle: the expected message, on one line without control characters."""
    with pytest.raises(ForeignError) as caught:
        build(Outer, {**WHOLE, **change})
    assert reason in str(caught.value) and str(caught.value).isprintable()
