"""Options are declared with an effect, and refused if their switch is off."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from fsdptoys.errors import UnusedKeyError
from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.options import (
    Effect,
    check_declared,
    check_options,
    option,
    refuse_unused,
)


class Mode(Enum):
    """Modes."""

    none = "none"
    full = "full"
    partial = "partial"


@dataclass
class Section:
    """Switches and options that need them."""

    mode: Mode = option(Mode.none, effect=Effect.none)
    count: int = option(1, at_least(1), effect=Effect.none)
    names: list[str] = option([], effect=Effect.none)
    any_mode: int = option(0, effect=Effect.none, needs="part.mode")
    one_mode: int = option(0, effect=Effect.none, needs="part.mode=partial")
    several: int = option(0, effect=Effect.none, needs="part.count")
    for_names: int = option(0, effect=Effect.none, needs=("part.names=a", "part.mode"))
    elsewhere: int = option(0, effect=Effect.none, needs="other.switch")


REFUSED = {
    "any_mode": (
        "part.any_mode=1 has no effect unless part.mode=full; set part.mode=full or leave it out"
    ),
    "one_mode": (
        "part.one_mode=1 has no effect unless part.mode=partial; set part.mode=partial or leave "
        "it out"
    ),
    "several": (
        "part.several=1 has no effect unless part.count is above 1; set part.count=2 or leave it "
        "out"
    ),
    "for_names": (
        "part.for_names=1 has no effect unless part.names=[a] or part.mode=full; set "
        "part.names=[a] or leave it out"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_option_without_its_switch_is_refused_in_a_sentence_that_names_it(
    name: str,
) -> None:
    """Oracle: the sentences by hand."""
    with pytest.raises(UnusedKeyError) as refused:
        check_options("part", Section(**{name: 1}))
    assert str(refused.value) == REFUSED[name]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"any_mode": 1, "mode": Mode.partial},
        {"one_mode": 1, "mode": Mode.partial},
        {"for_names": 1, "names": ["b", "a"]},
        {"elsewhere": 1},
    ],
)
def test_option_with_any_of_its_switches_is_accepted(values: dict[str, Any]) -> None:
    """Oracle: the declarations above; a switch of another section is judged where that section
    is."""
    check_options("part", Section(**values))


def test_switch_of_another_section_is_judged_where_both_are() -> None:
    """Oracle: two sections by hand."""

    @dataclass
    class Other:
        switch: bool = option(False, effect=Effect.none)

    refuse_unused({"part": Section(elsewhere=1), "other": Other(switch=True)}, "part")
    with pytest.raises(UnusedKeyError, match="has no effect unless"):
        refuse_unused({"part": Section(elsewhere=1), "other": Other()}, "part")


def test_forgotten_effect_fails_at_import() -> None:
    """Oracle: a call without it, and a plain field of a section."""
    with pytest.raises(TypeError, match="effect"):
        option(1)  # type: ignore[call-arg]

    @dataclass
    class Forgotten(Section):
        plain: int = 0

    with pytest.raises(TypeError, match=r"Forgotten\.plain must be declared"):
        check_declared(Forgotten)
    check_declared(Section)
