"""An ``argparse`` parser: its mistakes are sentences with the closest valid option.

Commands take dashed options; the settings of a run are ``key=value`` words without dashes, which
stay in order.
"""

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import suggestion


class Parser(argparse.ArgumentParser):
    """The dashed options of a command; each mistake is a ``ConfigError``.

    Args:
        page: returns the end of the help page, if it is read from files.
        strict: refuse unknown options; otherwise they stay in ``arguments``.
    """

    def __init__(
        self,
        page: Callable[[], str] | None = None,
        strict: bool = True,
        **settings: Any,
    ) -> None:
        self.page = page
        self.strict = strict
        self.examples: dict[str, str] = {}
        self.any_text: set[str] = set()
        """Options whose values may be empty, or begin with dashes after an equals sign."""
        super().__init__(
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, width=120, max_help_position=30
            ),
            allow_abbrev=False,
            add_help=False,
            **settings,
        )

    def flag(self, option: str, text: str) -> None:
        """Add an option without a value."""
        self.examples[option] = ""
        self.add_argument(option, action="store_true", help=text)

    def value(self, form: str, text: str, example: str = "", **settings: Any) -> None:
        """Add an option with a value, ``form`` being ``--option METAVAR``; messages show the
        example of a value.

        ``settings`` are those of ``add_argument``, except that ``type`` takes the option and the
        typed value.
        """
        option, _, metavar = form.partition(" ")
        self.examples[option] = example or metavar
        if "type" in settings:
            settings["type"] = functools.partial(settings["type"], option)
        self.add_argument(option, metavar=metavar, help=text, **settings)

    def forms(self, texts: dict[str, str]) -> None:
        """Add flags that exclude one another; ``form`` is the given one."""
        group = self.add_mutually_exclusive_group()
        for option, text in texts.items():
            self.examples[option] = ""
            group.add_argument(
                option, action="store_const", dest="form", const=option, help=text
            )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse what follows the command; ``arguments`` of the result belong to no option.

        Raises:
            ConfigError: for the first mistake.
        """
        options, rest = self.parse_known_args(self._join_values(argv))
        options.arguments = rest
        for word in rest if self.strict else ():
            name, equals, value = word.partition("=")
            if word.startswith("-"):
                fix = suggestion(name, list(self.examples), f"see {self.prog} --help")
                raise ConfigError(f"{word} is not an option of {self.prog}; {fix}")
            if equals and f"--{name}" in self.examples:
                raise ConfigError(f"{word} lacks its dashes; write --{name} {value}")
        return options

    def _join_values(self, argv: Sequence[str]) -> list[str]:
        """Write each value as ``--option=value``; alone, argparse would take a value like -x for an
        option."""
        joined = []
        queue = list(argv)
        while queue:
            word = queue.pop(0)
            option, equals, value = word.partition("=")
            example = self.examples.get(option)
            if example == "" and equals:
                raise ConfigError(
                    f"{word} gives a value to {option}, which takes none; write {option}"
                )
            if example:
                missing = not equals and (not queue or queue[0].startswith("--"))
                if not equals and not missing:
                    value = queue.pop(0)
                if missing or (
                    option not in self.any_text
                    and (not value or value.startswith("--"))
                ):
                    raise ConfigError(
                        f"{option} has no value; write {option} {example}"
                    )
                word = f"{option}={value}"
            joined.append(word)
        return joined

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message, after the name of the argument, as a ``ConfigError``."""
        option, _, reason = message.removeprefix("argument ").partition(": ")
        other = reason.removeprefix("not allowed with argument ")
        raise ConfigError(
            f"{other} and {option} exclude each other; keep one of them"
            if other != reason
            else reason
        )

    def format_help(self) -> str:
        """Return the help page."""
        if self.page is not None:
            self.epilog = self.page()
        return super().format_help()


AddCommand = Callable[..., Parser]
"""Adds a command: its usages, a summary, a description and settings of ``Parser``."""


def integer(fix: int, least: int = 1) -> Callable[[str, str], int]:
    """Return a reader of integers of at least ``least``; messages suggest ``fix``."""

    def read(option: str, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            fault = (
                f"{option} {text} must be a whole number of at least {least}; "
                f"write {option} {fix}"
            )
            raise argparse.ArgumentTypeError(fault)
        return int(text)

    return read


def number(
    bounds: str, fix: str, allowed: Callable[[float], bool]
) -> Callable[[str, str], float]:
    """Return a reader of finite numbers; ``bounds`` describes the allowed ones."""

    def read(option: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and allowed(value)):
            raise argparse.ArgumentTypeError(
                f"{option} {text} must be a {bounds}; write {option} {fix}"
            )
        return value

    return read
