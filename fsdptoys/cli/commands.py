"""Parse the arguments of a command, run the part that they name, and print help pages."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import suggestion

from .command_table import make_parsers


def parse(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after a command; see ``Parser.parse``."""
    return make_parsers()[1][command].parse(argv)


def check_count(
    command: str, arguments: Sequence[str], count: int, needed: str, form: str
) -> None:
    """Check the number of arguments without dashes; ``needed`` and ``form`` describe them in the
    message."""
    if len(arguments) != count:
        raise ConfigError(
            f"fsdptoys {command} needs {needed}, not {' '.join(arguments) or 'nothing'}; write "
            f"fsdptoys {command} {form}"
        )


def run_part(
    command: str,
    argv: Sequence[str],
    parts: Mapping[str, Callable[[Sequence[str]], int]],
) -> int:
    """Run the part of a command that its first argument names, with the rest; return the exit
    status."""
    if argv[0] not in parts:
        fix = suggestion(
            argv[0],
            list(parts),
            f"see fsdptoys {command} --help",
            f"fsdptoys {command} ",
        )
        raise ConfigError(f"fsdptoys {command} {argv[0]} is not a command; {fix}")
    return parts[argv[0]](argv[1:])


def command_names() -> list[str]:
    """Return the names of the commands, by their first words."""
    return list(dict.fromkeys(name.partition(" ")[0] for name in make_parsers()[1]))


def help_page(command: str = "") -> str:
    """Return a command's help page with those of its parts, or the page of ``fsdptoys --help``."""
    root, parsers = make_parsers()
    pages = [
        parser.format_help()
        for name, parser in parsers.items()
        if command in (name, name.partition(" ")[0])
    ]
    return "\n".join(pages) if command else root.format_help()
