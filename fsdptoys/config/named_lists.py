"""Lists of names with options of each name: ``metrics.writers`` and ``train.callbacks``.

``metrics.writers=[mlflow] writers.mlflow.experiment=llamas`` chooses a writer and sets its option.
The sections ``writers`` and ``callbacks`` of a configuration map each chosen name to its
dataclass. Nothing else differs from the options of other sections: they have types, bounds and
closest matches, and are saved with the run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.metrics import WRITERS
from fsdptoys.register import registered
from fsdptoys.utils.text import near_miss, value_text


class NamedList(NamedTuple):
    """A list of names, and the section with their options."""

    section: str
    key: str
    """Of the list."""
    classes: Mapping[str, type[Any]]
    """Name → dataclass of its options; live."""

    def missing(self, name: str) -> str:
        """The end of a sentence on a name without a class."""
        if near := near_miss(name, list(self.classes)):
            return f"did you mean {near}?"
        return f"add --import with the module or file that registers it, or leave {name} out"


NAMED_LISTS = (
    NamedList("writers", "metrics.writers", WRITERS),
    NamedList("callbacks", "train.callbacks", registered("callbacks")),
)
SECTIONS = {named.section: named for named in NAMED_LISTS}


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


def check_listed(key: str, names: Sequence[str]) -> None:
    """Check the names of a list.

    Args:
        key: of the list.
        names: its elements.

    Raises:
        ConfigError: for a name that nothing has registered, or one that occurs twice.
    """
    (named,) = (named for named in NAMED_LISTS if named.key == key)
    for name in names:
        if name not in named.classes:
            raise ConfigError(
                f"{key} names {name}, which is not registered; {named.missing(name)}"
            )
    if len(set(names)) < len(names):
        once = ",".join(dict.fromkeys(names))
        raise ConfigError(
            f"{key}=[{','.join(names)}] names one twice; set {key}=[{once}]"
        )
