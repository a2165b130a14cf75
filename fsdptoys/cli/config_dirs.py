"""``--config-dir``: folders with own files of groups, for this process and those that it starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from fsdptoys.config.choices import CONFIG_DIRS
from fsdptoys.errors import ConfigError

OPTION = "--config-dir"
COMMANDS = ("train", "sweep", "plan", "models", "config", "completion")
"""Commands that read files of groups."""


def take_config_dirs(command: str, argv: Sequence[str]) -> list[str]:
    """Set the folders that the words after a command name, and return the other words.

    Raises:
        ConfigError: for a folder that does not exist.
    """
    rest = []
    folders = []
    queue = list(argv) if command in COMMANDS else []
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if option != OPTION:
            rest.append(word)
            continue
        value = value if equals else (queue.pop(0) if queue else "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{OPTION} has no value; write {OPTION} DIR")
        path = Path(value).expanduser()
        if not path.is_dir() or os.pathsep in value:
            raise ConfigError(
                f"{OPTION} {value} is not a folder; name one with a folder for each group, as "
                "DIR/model"
            )
        folders.append(os.path.abspath(path))
    if folders:
        inherited = os.environ.get(CONFIG_DIRS, "").split(os.pathsep)
        names = dict.fromkeys([*folders, *(name for name in inherited if name)])
        os.environ[CONFIG_DIRS] = os.pathsep.join(names)
    return rest if command in COMMANDS else list(argv)
