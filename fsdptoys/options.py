"""Options with dashes, which commands beside ``train`` have; settings of a run have none."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .errors import ConfigError


def take_options(
    words: Sequence[str], flags: Sequence[str] = (), values: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], dict[str, str]]:
    """Take dashed options out of the words; an unknown one stays, and is refused as every setting with dashes is.

    Args:
        words: as typed.
        flags: options without a value.
        values: options with one, ``--out FILE`` or ``--out=FILE`` → what it is called, ``FILE``.

    Returns:
        The other words, and option → value, which is empty for a flag.

    Raises:
        ConfigError: for an option without its value, or with another option in its place.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word in flags:
            options[word] = ""
        elif name in values:
            if not equals:
                value = queue.pop(0) if queue else ""
            if not value or value.startswith("--"):
                raise ConfigError(f"{name} has no value; write {name} {values[name]}")
            options[name] = value
        else:
            rest.append(word)
    return rest, options
