"""JSON Schema of configuration files, from the dataclasses, for editors and other programs.

Types, choices, bounds and docstrings are those of the command line. What the schema cannot say are
the rules between settings, which ``fsdptoys train --config FILE --cfg job`` checks.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from fsdptoys.utils.bounds import GUARD, Bounds, bounds_of
from fsdptoys.utils.option_docs import read_docs
from fsdptoys.utils.options import default_of

from .choices import BASE, list_choices, schema_name
from .named_lists import NAMED_LISTS
from .option_values import SWITCHED_CHOICES, Option
from .schema import ROOT_OPTIONS, SCHEMAS, Config
from .sections import Sections

DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXPERIMENT = "experiment"

Schema = dict[str, Any]


def file_schema() -> Schema:
    """Return the schema of a file for ``--config``."""
    return {
        "$schema": DIALECT,
        "title": "Settings of fsdptoys train",
        "type": "object",
        "properties": _root_properties(),
        "patternProperties": {r"^\w+\.[\w.]+$": {}},
        "additionalProperties": False,
        "$defs": _sections(),
    }


def group_schema(group: str) -> Schema:
    """Return the schema of the YAML files of a group."""
    entry = {"type": ["string", "object"]}
    defaults = {
        "description": "The schema or the file with which this one begins, and _self_.",
        "type": "array",
        "minItems": 1,
        "items": entry,
    }
    sections = _sections()
    if group == EXPERIMENT:
        properties = _root_properties()
    else:
        properties = dict(sections[group]["properties"])
        sections = {}
    return {
        "$schema": DIALECT,
        "title": f"A file of {group}",
        "type": "object",
        "required": ["defaults"],
        "properties": {"defaults": defaults, **properties},
        "additionalProperties": False,
        "$defs": sections,
    }


def dataclass_schema(kind: type) -> Schema:
    """Return the schema of another YAML file that is read into a dataclass, such as a sweep's."""
    return {"$schema": DIALECT, **_object_schema(kind), "title": kind.__name__}


def _root_properties() -> Schema:
    choices = list_choices()
    docs = read_docs(Sections).fields
    properties: Schema = {}
    for section, kind in typing.get_type_hints(Config).items():
        reference = {"$ref": f"#/$defs/{section}"}
        if section in choices:
            names = {"enum": choices[section]}
            properties[section] = {"anyOf": [names, reference]}
        elif dataclasses.is_dataclass(kind):
            properties[section] = {"anyOf": [reference, {"type": "null"}]}
        elif section in ROOT_OPTIONS:
            properties[section] = _with_docs(
                _value_schema(section, ROOT_OPTIONS[section], Bounds()),
                docs.get(section, ""),
            )
    for named_list in NAMED_LISTS:
        section = named_list.section
        properties[section] = {
            "description": docs.get(section, ""),
            "type": "object",
            "properties": {
                name: _object_schema(kind, f"{section}.{name}")
                for name, kind in named_list.classes.items()
            },
            "additionalProperties": False,
        }
    properties[EXPERIMENT] = {
        "description": "Settings of several groups at once.",
        "enum": [*choices[EXPERIMENT], None],
    }
    properties["imports"] = {
        "description": "Record of own code, which is never loaded from a file.",
        "type": "array",
        "items": {"type": "object", "required": ["name", "sha256"]},
    }
    return properties


def _sections() -> Schema:
    """Return the schemas of the sections; those of a group have the options of all choices."""
    choices = list_choices()
    sections: Schema = {}
    for section, kind in typing.get_type_hints(Config).items():
        if section not in SCHEMAS:
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                sections[section] = _object_schema(kind, section)
            continue
        kinds = SCHEMAS[section]
        schemas = {
            name: _object_schema(schema, section) for name, schema in kinds.items()
        }
        names_of_kind: dict[str, list[str]] = {
            name: [f"{BASE}{name}"] for name in kinds
        }
        for choice in choices[section]:
            names_of_kind[schema_name(section, choice)].append(choice)
        names = [name for names in names_of_kind.values() for name in names]
        own: Schema = {"name": {"description": "The choice.", "enum": names}}
        if section == "model":
            title = {"description": "The preset, or a title beside a family."}
            own = {
                "name": {**title, "anyOf": [{"enum": names}, {"type": "string"}]},
                "family": {"description": "Kind of model.", "enum": list(kinds)},
            }
        sections[section] = {
            "type": "object",
            "description": read_docs(typing.cast(type, kind)).doc,
            "properties": own | _joined(schemas),
            "additionalProperties": False,
            "allOf": [
                _only_own(key, values, schemas[name], own)
                for name, values in names_of_kind.items()
                for key, values in (
                    ("name", values),
                    *([("family", [name])] if section == "model" else []),
                )
            ],
        }
    return sections


def _joined(schemas: Mapping[str, Schema]) -> Schema:
    """Join the properties of a group's choices; those that differ may be of any of them."""
    joined: dict[str, list[Schema]] = {}
    for schema in schemas.values():
        for key, value in schema["properties"].items():
            alternatives = joined.setdefault(key, [])
            if value not in alternatives:
                alternatives.append(value)
    return {
        key: values[0] if len(values) == 1 else {"anyOf": values}
        for key, values in joined.items()
    }


def _only_own(key: str, values: list[str], schema: Schema, own: Schema) -> Schema:
    """Return the condition that a choice has its own options only."""
    options = [*own, *schema["properties"]]
    return {
        "if": {"properties": {key: {"enum": values}}, "required": [key]},
        "then": {"propertyNames": {"enum": options}},
    }


def _object_schema(kind: type, prefix: str = "") -> Schema:
    """Return the schema of a dataclass."""
    hints = typing.get_type_hints(kind)
    docs = read_docs(kind)
    properties: Schema = {}
    required = []
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        key = f"{prefix}.{field.name}" if prefix else field.name
        default = default_of(field)
        schema = _value_schema(key, Option(annotation, default), bounds_of(field))
        properties[field.name] = _with_docs(schema, docs.fields.get(field.name, ""))
        plain = getattr(default, "value", default)
        if default is dataclasses.MISSING:
            required.append(field.name)
        elif plain is None or isinstance(plain, (bool, int, float, str)):
            properties[field.name]["default"] = plain
    schema = {
        "type": "object",
        "description": docs.doc,
        "properties": properties,
        "additionalProperties": False,
    }
    return schema | ({"required": required} if required and not prefix else {})


def _with_docs(schema: Schema, doc: str) -> Schema:
    return {"description": doc, **schema} if doc else dict(schema)


def _value_schema(key: str, option: Option, bounds: Bounds) -> Schema:
    """Return the schema of a setting's value."""
    if option.annotation is Any:
        word: Schema = {"type": ["string", "array"], "items": {"type": "string"}}
        return {"type": ["integer", "string"]} if option.base_type is not Any else word
    schema = _type_schema(key, option.base_type, bounds)
    if option.nullable:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def _type_schema(key: str, kind: Any, bounds: Bounds) -> Schema:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (list, tuple):
        return {"type": "array", "items": _type_schema(key, arguments[0], bounds)}
    if origin in (dict, Mapping):
        values = _type_schema(key, arguments[1], bounds)
        return {"type": "object", "additionalProperties": values}
    if kind is Any:
        return {}
    if kind is bool:
        return {"type": "boolean"}
    if kind is str:
        return {"type": ["string", "number"]}
    if kind in (int, float):
        return _number_schema("integer" if kind is int else "number", bounds)
    if issubclass(kind, Enum):
        names = list(dict.fromkeys([*kind.__members__, *(item.value for item in kind)]))
        switches = [True, False] if key in SWITCHED_CHOICES else []
        return {"enum": [*names, *switches]}
    return _object_schema(kind)


def _number_schema(name: str, bounds: Bounds) -> Schema:
    schema: Schema = {"type": name}
    if bounds.least > -math.inf:
        schema["exclusiveMinimum" if bounds.above else "minimum"] = bounds.least
    if bounds.most < GUARD:
        schema["exclusiveMaximum" if bounds.below else "maximum"] = bounds.most
    if bounds.other is not None:
        return {"anyOf": [schema, {"const": bounds.other}]}
    return schema
