"""Names in a list, such as those of ``metrics.writers``."""

from collections.abc import Collection, Sequence

from fsdptoys.errors import ConfigError

from .text import near_miss


def check_names(key: str, names: Sequence[str], all_names: Collection[str]) -> None:
    """Check the names of a list.

    Args:
        key: of the list.
        names: its elements.
        all_names: names of the built-in and the registered ones.

    Raises:
        ConfigError: for a name that is not known, or one that occurs twice.
    """
    for name in names:
        if name not in all_names:
            raise ConfigError(
                f"{key} names {name}, which is {_none_of(all_names)}; {missing(name, all_names)}"
            )
    if len(set(names)) < len(names):
        once = ",".join(dict.fromkeys(names))
        raise ConfigError(
            f"{key}=[{','.join(names)}] names one twice; set {key}=[{once}]"
        )


def missing(name: str, all_names: Collection[str]) -> str:
    """Return the end of a sentence on an unknown name."""
    if near := near_miss(name, list(all_names)):
        return f"did you mean {near}?"
    return (
        f"leave {name} out, or add --import with the module or file that registers it"
    )


def _none_of(all_names: Collection[str]) -> str:
    return f"none of {', '.join(all_names)}" if all_names else "not registered"
