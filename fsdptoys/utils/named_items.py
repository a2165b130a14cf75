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
                f"{key} names {name}, which is {_none_of(all_names)}; "
                f"{_fix(key, names, name, all_names)}"
            )
    if len(set(names)) < len(names):
        once = ",".join(dict.fromkeys(names))
        raise ConfigError(
            f"{key}=[{','.join(names)}] names one twice; set {key}=[{once}]"
        )


def _fix(
    key: str, names: Sequence[str], unknown: str, all_names: Collection[str]
) -> str:
    near = near_miss(unknown, list(all_names))
    if near is not None:
        corrected = ",".join(near if name == unknown else name for name in names)
        return f"did you mean {key}=[{corrected}]?"
    others = ",".join(name for name in names if name != unknown)
    return f"set {key}=[{others}], or add the --import of the code that registers {unknown}"


def _none_of(all_names: Collection[str]) -> str:
    return f"none of {', '.join(all_names)}" if all_names else "not registered"
