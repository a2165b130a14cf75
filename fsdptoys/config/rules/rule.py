"""Rules across sections: which settings exclude one another, why, and what to set instead.

A rule applies where all of its settings hold. It has whole literal sentences, so that a search for
the words of a message finds it. Rules are checked in the order of their files, before any process
group or allocation; the first sentence is the message.

A setting is ``KEY=VALUE``, ``KEY!=VALUE``, or ``KEY`` for any other value than the default;
``{KEY}`` in a sentence stands for ``KEY=`` and its value, ``{=KEY}`` for the value. Groups
(``parallel``, ``optim``, ``tune``, ``model``) stand for what they chose, ``launch.device`` for the
type of the device, and keys like ``optim.exchanges_matrices`` for facts about a choice.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.sections import Sections
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.parallel.mesh import Axes
from fsdptoys.utils.options import default_of
from fsdptoys.utils.text import value_text

DEVICE = "launch.device"


@dataclass(frozen=True)
class Where:
    """What a configuration is to run on."""

    world_size: int
    device_type: str
    axes: Axes


Condition = Callable[[Sections, Where], bool]
Check = Callable[[Sections, Where], str | None]


@dataclass(frozen=True)
class Rule:
    """A check, and the settings without which it passes."""

    settings: tuple[str, ...]
    check: Check
    unused: bool = False
    """Whether its sentence begins with a setting that has no effect, which sweeps drop."""


class Rules:
    """Rules of a topic, in their order."""

    def __init__(self) -> None:
        self.all: list[Rule] = []

    def rule(self, *settings: str) -> Callable[[Check], Check]:
        """Register a function that returns the sentence against a configuration with these
        settings, or None."""

        def register(check: Check) -> Check:
            self.all.append(Rule(settings, check))
            return check

        return register

    def exclude(
        self,
        *settings: str,
        when: Condition | None = None,
        unused: bool = False,
        says: str,
    ) -> None:
        """Refuse settings that occur together.

        Args:
            settings: all of them must hold.
            when: a further condition.
            unused: whether the sentence begins with a setting that has no effect.
            says: the sentence.
        """

        def check(config: Sections, where: Where) -> str | None:
            return (
                fill(says, config, where)
                if when is None or when(config, where)
                else None
            )

        self.all.append(Rule(settings, check, unused))


def check_rules(rules: Iterable[Rule], config: Sections, where: Where) -> None:
    """Check rules in their order.

    Raises:
        ConfigError: with the first sentence.
    """
    for rule in rules:
        applies = all(holds(config, where, setting) for setting in rule.settings)
        sentence = rule.check(config, where) if applies else None
        if sentence is not None:
            raise UnusedKeyError(sentence) if rule.unused else ConfigError(sentence)


def holds(config: Sections, where: Where, setting: str) -> bool:
    """Return whether a configuration has a setting; a strategy or model without the option does
    not."""
    key, unequal, expected = _parts(setting)
    try:
        value = value_text(read(config, where, key))
    except AttributeError:
        return False
    if expected:
        return (value == expected) is not unequal
    section, _, name = key.partition(".")
    return value != value_text(
        default_of(getattr(config, section).__dataclass_fields__[name])
    )


@functools.cache
def _parts(setting: str) -> tuple[str, bool, str]:
    """Return key, whether the value must differ, and value."""
    match = re.fullmatch(r"([\w.]+)(?:(!?=)(.+))?", setting)
    assert match is not None
    key, sign, value = match.groups(default="")
    return key, sign == "!=", value


def read(config: Sections, where: Where, key: str) -> Any:
    """Return the value of a key, the choice of a group, or the type of the device."""
    section, _, name = key.partition(".")
    chosen = getattr(config, section)
    if key == DEVICE:
        return where.device_type
    if name:
        return operator.attrgetter(name)(chosen)
    return chosen.name or chosen.family if section == "model" else chosen.name


def fill(sentence: str, config: Sections, where: Where) -> str:
    """Replace each ``{KEY}`` of a sentence with ``KEY=`` and its value, ``{=KEY}`` with the
    value."""

    def setting(match: re.Match[str]) -> str:
        value = value_text(read(config, where, match[2]))
        return value if match[1] else f"{match[2]}={value}"

    return re.sub(r"\{(=?)([\w.]+)\}", setting, sentence)
