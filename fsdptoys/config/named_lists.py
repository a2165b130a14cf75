"""Lists of names with options of each name: ``metrics.writers`` and ``train.callbacks``.

``metrics.writers=[mlflow] writers.mlflow.experiment=llamas`` chooses a writer and sets its option.
The sections ``writers`` and ``callbacks`` of a configuration map each chosen name to its
dataclass. Nothing else differs from the options of other sections: they have types, bounds and
closest matches, and are saved with the run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdptoys.metrics import WRITERS
from fsdptoys.register import registered


class NamedList(NamedTuple):
    """A list of names, and the section with their options."""

    section: str
    key: str
    """Of the list."""
    classes: Mapping[str, type[Any]]
    """Name → dataclass of its options; live."""


NAMED_LISTS = (
    NamedList("writers", "metrics.writers", WRITERS),
    NamedList("callbacks", "train.callbacks", registered("callbacks")),
)


def named_schemas() -> dict[str, type[Any]]:
    """Return ``section.name`` → dataclass of every name."""
    return {
        f"{name_list.section}.{name}": schema
        for name_list in NAMED_LISTS
        for name, schema in name_list.classes.items()
    }


def is_named_option(key: str) -> bool:
    """Return whether a key is an option of a name in a list."""
    return key.partition(".")[0] in [name_list.section for name_list in NAMED_LISTS]


def named_fields() -> dict[str, "dataclasses.Field[Any]"]:
    """Return key → field of every option."""
    return {
        f"{prefix}.{field.name}": field
        for prefix, schema in named_schemas().items()
        for field in dataclasses.fields(schema)
    }
