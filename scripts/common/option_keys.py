"""Keys of the configuration with their types, defaults, bounds and docstrings, for generated
files."""

import dataclasses
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from fsdptoys.config.named_lists import NAMED_LISTS, named_schemas
from fsdptoys.config.schema import SCHEMAS, Config
from fsdptoys.config.sections import Sections
from fsdptoys.utils.bounds import bounds_of
from fsdptoys.utils.option_docs import read_docs
from fsdptoys.utils.options import Declared, declared_of

NAMED_SECTIONS = [named_list.section for named_list in NAMED_LISTS]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    name: str
    annotation: Any
    default: Any
    bounds: str
    doc: str
    declared: Declared | None = None

    @property
    def enum(self) -> type[Enum] | None:
        """The enum of its values, if any."""
        kinds = [
            kind
            for kind in (*typing.get_args(self.annotation), self.annotation)
            if isinstance(kind, type)
        ]
        return next((kind for kind in kinds if issubclass(kind, Enum)), None)

    @property
    def values(self) -> str:
        """Choices or bounds, if any."""
        return (
            ", ".join(member.name for member in self.enum) if self.enum else self.bounds
        )


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Keys of a dataclass in their order, with those of nested dataclasses."""
    hints = typing.get_type_hints(schema)
    docs = read_docs(schema).fields
    for field in dataclasses.fields(schema):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from keys_of(annotation, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        default = (
            field.default
            if callable(field.default_factory) is False
            else field.default_factory()
        )
        # A subclass that changes a default keeps the bounds
        owners = [
            vars(owner).get("__dataclass_fields__", {}) for owner in schema.__mro__
        ]
        declared = [str(bounds_of(of[field.name])) for of in owners if field.name in of]
        bounds = next(filter(None, declared), "")
        doc = docs.get(field.name, "")
        yield Key(
            prefix + field.name, annotation, default, bounds, doc, declared_of(field)
        )


def root_keys() -> list[Key]:
    """Keys outside of any section."""
    docs = read_docs(Sections).fields
    hints = typing.get_type_hints(Config)
    fields = [
        field
        for field in dataclasses.fields(Config)
        if not dataclasses.is_dataclass(hints[field.name])
        and field.name not in NAMED_SECTIONS
    ]
    return [
        Key(field.name, hints[field.name], field.default, "", docs[field.name])
        for field in fields
    ]


def completion_lines() -> str:
    """The keys that a shell completes: key, the schemas that have it (none: all), and its values,
    separated by tabs."""
    lines = [completion_line(key, "", []) for key in root_keys()]
    for section, kind in typing.get_type_hints(Config).items():
        if not dataclasses.is_dataclass(kind):
            continue
        shared = {key.name: key for key in keys_of(kind)}  # type: ignore[arg-type]
        lines += [completion_line(key, section, []) for key in shared.values()]
        keys: dict[str, Key] = {}
        owners: dict[str, list[str]] = {}
        for name, schema in SCHEMAS.get(section, {}).items():
            for key in keys_of(schema):
                if key.name not in shared:
                    keys.setdefault(key.name, key)
                    owners.setdefault(key.name, []).append(name)
        lines += [completion_line(keys[name], section, owners[name]) for name in keys]
    for prefix, schema in named_schemas().items():
        lines += [completion_line(key, prefix, []) for key in keys_of(schema)]
    return "\n".join(lines) + "\n"


def completion_line(key: Key, section: str, owners: list[str]) -> str:
    """A key of ``completion_lines``."""
    values = [member.name for member in key.enum] if key.enum else []
    values += ["true", "false"] * (key.annotation is bool)
    values += ["null"] * (type(None) in typing.get_args(key.annotation))
    name = f"{section}.{key.name}" if section else key.name
    return f"{name}\t{','.join(owners)}\t{','.join(values)}"
