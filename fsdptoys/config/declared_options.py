"""Declarations of all options, by key, for whatever says something on options: reports, sweeps,
searches, pages."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from fsdptoys.register import live_cache
from fsdptoys.utils.options import Declared, Effect, declared_of, default_of, is_on

from .named_lists import named_fields
from .schema import SCHEMAS, Config


@live_cache
def option_fields() -> dict[str, "dataclasses.Field[Any]"]:
    """Return key → field of every option of a section, whatever is chosen; ``models/`` declares
    those of models."""
    return {
        f"{section}.{field.name}": field
        for section, kind in typing.get_type_hints(Config).items()
        for schema in reversed((kind, *SCHEMAS.get(section, {}).values()))
        if dataclasses.is_dataclass(schema)
        for field in dataclasses.fields(schema)
        if declared_of(field)
    } | named_fields()


@live_cache
def declared_options() -> dict[str, Declared]:
    """Return key → declaration."""
    declared = {
        key: declaration
        for key, field in option_fields().items()
        if (declaration := declared_of(field)) is not None
    }
    for key in declared:
        if key.startswith("writers."):  # nothing that a writer does changes a loss
            declared[key] = declared[key]._replace(effect=Effect.none)
    return declared


def option_defaults() -> dict[str, Any]:
    """Return key → default as in ``config.yaml``."""
    return {
        key: getattr(default_of(field), "value", default_of(field))
        for key, field in option_fields().items()
    }


def without_switched_off(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out settings without effect, since their switch is off.

    Args:
        values: key → value, of the options or as in ``config.yaml``.
    """
    fields = option_fields()
    settings = {}
    for key, value in values.items():
        needs = declared_options()[key].needs if key in fields else ()
        switches = {need: need.partition("=")[0] for need in needs}
        present = {
            need: switch for need, switch in switches.items() if switch in values
        }
        on = [
            is_on(need, values[switch], default_of(fields[switch]))
            for need, switch in present.items()
        ]
        if any(on) or len(present) < len(switches) or not needs:
            settings[key] = value
    return settings
