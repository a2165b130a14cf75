"""Declare an option of the configuration once, beside its default: bounds, effect on numbers,
switch, familiar names.

    grains: int = option(8, at_least(1), effect=Effect.rounding, needs="train.deterministic=layout")

Everything that says something on options derives it from these declarations: checks, reports,
sweeps, the planner's search, ``docs/options.md`` and the YAML files. The effect has no default, and
a section with an option that lacks one fails at import of ``config.schema``: a comparison of two
runs would blame the wrong setting.
"""

import copy
import dataclasses
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from fsdptoys.errors import UnusedKeyError
from fsdptoys.register import OWN

from .bounds import Bounds, check_bounds
from .text import value_text


class Effect(IntEnum):
    """Largest effect of changing an option on losses, strongest first."""

    training = 0
    """Other losses: another model, data or optimizer."""
    format = 1
    """Another dtype: losses are close, within its rounding."""
    rounding = 2
    """Another order of summation or kernel: the last bits."""
    none = 3
    """Bitwise equal losses."""


class Stage(IntEnum):
    """Stage of a step in which an option first acts."""

    forward = 0
    """Shows in the loss of the first step."""
    gradient = 1
    """Shows in the gradient of the first step, not in its loss."""
    update = 2
    """Shows in the second step."""


class Declared(NamedTuple):
    """Declaration of an option, beside its type and default."""

    effect: Effect
    acts: Stage = Stage.forward
    needs: tuple[str, ...] = ()
    """Switches without which the option has no effect; one is enough."""
    aliases: tuple[str, ...] = ()
    """Names of the same option in other frameworks, with the same values."""


def option(
    default: Any,
    bounds: Mapping[str, Bounds] | None = None,
    *,
    effect: Effect,
    acts: Stage = Stage.forward,
    needs: str | tuple[str, ...] = (),
    alias: str = "",
) -> Any:
    """Declare an option of a section.

    Args:
        default: value if nothing is typed; lists are copied.
        bounds: of its numbers, such as ``at_least(1)``.
        effect: of changing it.
        acts: first stage of a step that it changes.
        needs: switches without which it has no effect; one is enough:
            ``"memory.chunk_loss"`` is on with any other value than its default,
            ``"train.deterministic=layout"`` with this value.
        alias: names in other frameworks, separated by spaces.
    """
    switches = (needs,) if isinstance(needs, str) else needs
    metadata = {
        **(bounds or {}),
        "option": Declared(effect, acts, switches, tuple(alias.split())),
    }
    if isinstance(default, list):
        return dataclasses.field(
            default_factory=lambda: copy.copy(default), metadata=metadata
        )
    return dataclasses.field(default=default, metadata=metadata)


def declared_of(field: "dataclasses.Field[Any]") -> Declared | None:
    """Return the declaration of an option, for plain fields of own code that of a setting that may
    change losses; None for other fields."""
    own = Declared(Effect.training) if OWN in field.metadata else None
    return field.metadata.get("option", own)


def check_declared(section: Any) -> None:
    """Check that every field of a dataclass is an :func:`option`; other types pass.

    Raises:
        TypeError: naming the first field that is none.
    """
    for field in (
        dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    ):
        if declared_of(field) is None:
            raise TypeError(
                f"{section.__name__}.{field.name} must be declared as option(…, effect=…)"
            )


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, made anew."""
    return field.default_factory() if callable(field.default_factory) else field.default


def check_options(section: str, config: Any) -> None:
    """Check bounds, and refuse options without their switch in the same section.

    Raises:
        ConfigError: naming key, value and fix; an UnusedKeyError if a switch is off.
    """
    check_bounds(section, config)
    refuse_unused({section: config}, section)


def refuse_unused(sections: Mapping[str, Any], section: str) -> None:
    """Refuse a section's options without their switches; a switch of a section that is not
    given counts as on.

    Raises:
        UnusedKeyError: naming key, value and switch.
    """
    for field in dataclasses.fields(sections[section]):
        declared = declared_of(field)
        value = getattr(sections[section], field.name)
        if declared is None or not declared.needs or value == default_of(field):
            continue
        switches = [Switch.find(need, sections) for need in declared.needs]
        if all(switch.is_off for switch in switches):
            raise UnusedKeyError(
                f"{section}.{field.name}={value_text(value)} has no effect unless "
                f"{' or '.join(switch.condition for switch in switches)}; set {switches[0].fix} "
                "or leave it out"
            )


def is_on(need: str, value: Any, default: Any) -> bool:
    """Return whether a switch, as declared by ``needs``, is on; a list is if it contains the named
    element."""
    element = need.partition("=")[2]
    if not element:
        return value_text(value) not in ("false", value_text(default))
    return element in value if isinstance(value, list) else value_text(value) == element


class Switch(NamedTuple):
    """A switch in a configuration."""

    is_off: bool
    condition: str
    """That it is on, for a sentence."""
    fix: str
    """Override that switches it on."""

    @classmethod
    def find(cls, need: str, sections: Mapping[str, Any]) -> "Switch":
        """Find the switch that ``needs`` declares; it counts as on if its section is not given."""
        key, _, value = need.partition("=")
        section, _, name = key.partition(".")
        if section not in sections:
            return cls(False, "", "")
        default = default_of(sections[section].__dataclass_fields__[name])
        is_off = not is_on(need, getattr(sections[section], name), default)
        if isinstance(default, list):
            value = f"[{value}]"
        elif isinstance(default, Enum):
            value = value or next(
                value_text(member) for member in type(default) if member is not default
            )
        elif isinstance(default, bool):
            value = "true"
        else:
            return cls(is_off, f"{key} is above {default}", f"{key}={default + 1}")
        return cls(is_off, f"{key}={value}", f"{key}={value}")
