"""The command line and the page of a benchmark."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def page_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as help, and ``--write PAGE``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="a Markdown file for what is printed"
    )
    return parser


def command_line(argv: Sequence[str] | None = None) -> str:
    """Return the line of a page that names the command behind it; by default of this process."""
    command = [sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    return f"Command: `python {shlex.join(command)}`"


def publish(text: str, path: Path | None) -> None:
    """Print a page, and write it to a file if there is one."""
    print(text, flush=True)
    if path is not None:
        path.write_text(f"{text.rstrip()}\n")
