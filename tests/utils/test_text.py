"""Escaping of printed text, and lost consoles."""

import io

import pytest

from fsdptoys.utils.text import one_line, printable
from tests.launch.streams import run_with


def test_control_characters_are_escaped() -> None:
    """Oracle: Python's own escapes, for colors, titles, carriage returns, right-to-left marks and lone surrogates."""
    assert printable("a\x1b[31mb\x1b]0;t\x07\rc\u202ed\ud800") == "a\\x1b[31mb\\x1b]0;t\\x07\\rc\\u202ed\\ud800"
    assert printable("ü\tx\ny") == "ü\tx\ny"
    assert printable("ü", io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "\\xfc"
    assert one_line("a\nb\x1b") == "a b\\x1b"
    assert len(one_line("x" * 1000)) == 300
    assert len(one_line("x" * 1000, longest=None)) == 1000


PRINT_STATUS = (
    "import sys; from fsdptoys.utils.text import print_status; "
    "sys.exit(3 if print_status('x' * 10000, stdout=True) else 4)"
)


@pytest.mark.parametrize("stream", ["full", "broken", "closed", "fine"])
def test_lost_console_does_not_end_the_program(stream: str) -> None:
    """Oracle: the program's own exit status, and an empty stderr."""
    done = run_with(stream, "fine", ["-c", PRINT_STATUS])
    assert (done.returncode, done.stderr) == (3 if stream == "fine" else 4, "")
