"""Lists of the options in ``configs/`` and ``docs/options.md`` follow the config dataclasses."""

import dataclasses
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.overrides import list_choices
from fsdptoys.config.schema import SCHEMAS, Config
from fsdptoys.config.schema_docs import collect_keys, read_classes
from fsdptoys.utils.bounds import bounds_of
from fsdptoys.utils.foreign import parse_yaml
from scripts import write_options

CONFIGS = Path(__file__).parents[2] / "configs"
HINTS = typing.get_type_hints(Config)


def defaults_of(schema: type) -> list[tuple[str, Any]]:
    """Names and defaults of a dataclass's fields, in order, as plain values."""
    values = []
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        values.append((field.name, default.value if isinstance(default, Enum) else default))
    return values


@pytest.mark.parametrize("group", sorted(SCHEMAS.keys() - {"model"}))
def test_files_of_default_groups_list_all_keys_with_their_defaults(group: str) -> None:
    """Oracle: the fields of the dataclasses, in order."""
    for choice, schema in SCHEMAS[group].items():
        tree = parse_yaml((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
        assert list(tree.items())[1:] == defaults_of(schema), f"{choice}: run scripts/write_options.py"


def test_experiments_choose_memory_and_mesh_by_file() -> None:
    """Oracle: the YAML files; a key of an experiment would win over ``memory=none`` on the command line."""
    for experiment in list_choices()["experiment"]:
        tree = parse_yaml((CONFIGS / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8"))
        assert not {"memory", "mesh"} & tree.keys()


def test_config_yaml_lists_all_keys_outside_of_groups_with_their_defaults() -> None:
    """Oracle: the fields of the dataclasses, in order."""
    tree = parse_yaml((CONFIGS / "config.yaml").read_text(encoding="utf-8"))
    sections = {name: HINTS[name] for name in HINTS if name not in (*SCHEMAS, "patches")}
    assert {name: list(tree[name].items()) for name in sections} == {
        name: defaults_of(schema) for name, schema in sections.items()
    }
    assert list(tree)[1:] == [*sections, "patches", "hydra"]


def test_generated_files_are_up_to_date() -> None:
    """Oracle: ``scripts/write_options.py`` would write the same; run it after a change of a config dataclass."""
    stale = [path for path, text in write_options.generated_files().items() if path.read_text("utf-8") != text]
    assert stale == []


def test_options_page_names_every_choice_and_every_key() -> None:
    """Oracle: the YAML files of each group, and the fields of all dataclasses."""
    page = (CONFIGS.parent / "docs" / "options.md").read_text(encoding="utf-8")
    for group, choices in list_choices().items():
        assert all(f"- `{group}={choice}`: " in page for choice in choices)
    for section, schema in HINTS.items():
        for kind in SCHEMAS.get(section, {"": schema}).values():
            for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                assert f"| `{section}.{field.name}" in page


def test_bounds_read_from_the_source_equal_those_of_the_fields() -> None:
    """Oracle: the metadata of the imported dataclasses; a subclass that changes a default keeps the bounds."""
    classes = read_classes(Path(write_options.fsdptoys.__file__).parent)
    for section, schema in HINTS.items():
        for kind in SCHEMAS.get(section, {"": schema}).values():
            for name, key in collect_keys(classes, kind.__name__).items() if dataclasses.is_dataclass(kind) else ():
                owners = [owner for owner in kind.__mro__ if name in getattr(owner, "__dataclass_fields__", ())]
                declared = [str(bounds_of(owner.__dataclass_fields__[name])) for owner in owners]
                assert key.bounds == next(filter(None, declared), ""), name
