"""Checks of text and paths in a configuration."""

import os

from fsdptoys.errors import ConfigError

from .text import printable

FILE_BYTES = 200
"""Longest path of a file relative to its run directory, in bytes."""


def check_text(key: str, text: str) -> None:
    """Check that text is valid UTF-8 without NUL characters; invalid bytes of the command line are surrogates in it."""
    shown = f"{key}={printable(text)}" if key else printable(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{shown} is not valid UTF-8, as a run's config.yaml is; use another name") from None
    if "\0" in text:
        raise ConfigError(f"{shown} holds a NUL character, which no path may have; leave it out")


def check_home(key: str, path: str) -> None:
    """Check that a path's leading ``~`` or ``~user``, if any, can be expanded."""
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = path.partition("/")[0]
        raise ConfigError(f"{key}={path} starts with {user}, whose home folder is not known; write the folder's path")


def check_length(key: str, path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Check that the path of a directory leaves room for its files' names.

    Args:
        key: key of the setting with its value, for the message.
        path: absolute; need not exist.
        directory: the nearest existing parent.
    """
    longest_name, longest_path = os.pathconf(directory, "PC_NAME_MAX"), os.pathconf(directory, "PC_PATH_MAX")
    encoded = os.fsencode(path)
    longest = max(map(len, encoded.split(b"/")))
    if longest > longest_name:
        raise ConfigError(
            f"{key} has a name of {longest} bytes, and the file system takes {longest_name} at most; use a shorter one"
        )
    most = longest_path - 1 - FILE_BYTES
    if len(encoded) > most:
        raise ConfigError(
            f"{key} is a path of {len(encoded)} bytes, and a run directory may have {most} at most; use a shorter one"
        )
