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
        f"{named.section}.{name}": schema
        for named in NAMED_LISTS
        for name, schema in named.classes.items()
        if dataclasses.is_dataclass(schema)
    }


def check_sections(named: NamedList, names: Sequence[str], values: Any) -> None:
    """Refuse options of names that the list does not have.

    Args:
        named: the list.
        names: its elements.
        values: name → key → value, as composed.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{named.section}={value_text(values)} must map names to options; write "
            f"{named.section}.NAME.KEY=VALUE"
        )
    for name, options in values.items():
        if name not in named.classes:
            raise ConfigError(
                f"{named.section}.{name} names none that is registered; "
                f"{named.missing(str(name))}"
            )
        for key, value in options.items() if isinstance(options, Mapping) else ():
            if name not in names:
                chosen = ",".join([*names, str(name)])
                raise UnusedKeyError(
                    f"{named.section}.{name}.{key}={value_text(value)} has no effect unless "
                    f"{named.key} names {name}; set {named.key}=[{chosen}] or leave it out"
                )


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
