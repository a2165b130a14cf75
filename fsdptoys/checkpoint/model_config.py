"""Model configurations from files: type checks, and comparison by their effect on the weights.

Values come from JSON or YAML files that users may edit. A value of the wrong type would fail late and far away, so it
is rejected here under its name in the file.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.utils.text import one_line, value_text

EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def build_dataclass(kind: type, values: Mapping[str, Any], where: str, rename: Callable[[str], str] = str) -> Any:
    """Construct a dataclass, including nested ones, from a file's values.

    Args:
        kind: the dataclass.
        values: values of exactly its fields.
        where: the file, for messages.
        rename: field name → name in the file.

    Raises:
        ConfigError: for a missing or unknown key, a value of the wrong type, or one the dataclass rejects.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in values:
            raise ConfigError(f"{where} lacks {rename(name)}; add it")
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"{where} says {one_line(rename(str(name)))}={short(value)}, which nothing here reads; remove it"
            )

    def nested(name: str) -> Callable[[str], str]:
        return lambda part: rename(f"{name}.{part}")

    typed = {name: check_type(values[name], hints[name], where, rename(name), nested(name)) for name in names}
    try:
        return kind(**typed)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where} describes a model that cannot be built: {one_line(error)}") from error


def check_type(value: Any, annotation: Any, where: str, key: str, rename: Callable[[str], str] = str) -> Any:
    """Return a file's value as its field's type: integers become floats, mappings become dataclasses.

    Raises:
        ConfigError: naming file, key, value and type.
    """
    wanted, nullable = annotation, False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (wanted,) = (part for part in typing.get_args(annotation) if part is not type(None))
        nullable = True
    if (value is None and nullable) or type(value) is wanted:
        return value
    if dataclasses.is_dataclass(wanted) and isinstance(value, Mapping):
        assert isinstance(wanted, type)
        return build_dataclass(wanted, value, where, rename)
    if wanted is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    expected = EXPECTED.get(wanted, "a mapping") + (" or null" if nullable else "")
    raise ConfigError(f"{where} says {key}={short(value)}, which must be {expected}; correct it")


def short(value: Any) -> str:
    """Return a short text of a file's value for messages."""
    if isinstance(value, (Mapping, list)):
        # The full text can take minutes: YAML aliases expand exponentially.
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    return f"{value!r:.100}"


def differences(chosen: ModelConfig, wanted: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings of ``chosen`` to change so that weights of ``wanted`` (same family) compute the same.

    Returns:
        Key below ``model.`` → (chosen value, wanted value), in field order.
    """
    assert type(chosen) is type(wanted)
    found = {}
    mine, theirs = _flatten(chosen), _flatten(wanted)
    my_implied, their_implied = chosen.implied(), wanted.implied()
    for key, value in theirs.items():
        value = their_implied.get(key) if value is None else value
        if mine[key] is None and value == their_implied.get(key):
            continue  # implied by the other keys once they agree
        my_value = my_implied.get(key) if mine[key] is None else mine[key]
        if my_value != value and not wanted.is_cosmetic(key):
            found[key] = (my_value, value)
    return found


def check_same(chosen: ModelConfig, wanted: ModelConfig, holder: str, source: str) -> None:
    """Reject weights made with a configuration that differs from the run's.

    Args:
        chosen: the run's configuration.
        wanted: the weights' configuration.
        holder: name of the weights, for the message.
        source: command or file with all settings of the weights, for the message.

    Raises:
        ConfigError: naming the first differing field, both values and the fix.
    """
    if chosen.family != wanted.family:
        raise ConfigError(
            f"model={chosen.name} is of the family {chosen.family}, and {holder} holds a {wanted.family} model; "
            f"set what {source} tells"
        )
    found = differences(chosen, wanted)
    if not chosen.needs_its_context:
        found.pop("max_seq_len", None)
    for key, (mine, theirs) in found.items():
        rest = f" ({source} tells the other {len(found) - 1} too)" if len(found) > 1 else ""
        raise ConfigError(
            f"model.{key}={value_text(mine)} is not {value_text(theirs)}, with which the weights of {holder} were "
            f"made; set model.{key}={value_text(theirs)}{rest}"
        )


def _flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= _flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat
