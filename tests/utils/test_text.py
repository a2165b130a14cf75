"""Text for messages: sizes, and lines that end between words."""

import os
import pty

import pytest

from fsdptoys.utils.text import duration_text, size_text, wrapped

LAYOUT = (
    "units           6; largest layers.0 (197,888 parameters, 773.00 KiB gathered), smallest "
    "embed_tokens (32,768 parameters, 128.00 KiB gathered)"
)


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize(
    "text", [LAYOUT, "one line\n\n" + "word " * 60, "x" * 300, "step 3/10  loss 4.5"]
)
def test_lines_on_a_terminal_end_between_words(
    text: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the words, none cut, and the width; the text of a label begins in one
    column."""
    monkeypatch.setenv("COLUMNS", str(width))
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb"):
        lines = wrapped(text, terminal).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    if text is LAYOUT:
        assert all(line.startswith(" " * 16) for line in lines[1:])


def test_lines_of_a_file_are_not_broken() -> None:
    """Oracle: the text; a log is searched by its lines."""
    with open(os.devnull, "w") as file:
        assert wrapped(LAYOUT, file) == LAYOUT


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (2**30 - 2**20, "1023.00 MiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_size_is_in_the_unit_that_fits(count: int, text: str) -> None:
    """Oracle: the table."""
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59.6, "0:01:00"),
        (90061, "1 day, 1:01:01"),
        (1e308, "1e+308 s"),
        (10**30, "1e+30 s"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_every_duration_has_a_text(seconds: float, text: str) -> None:
    """Oracle: the table."""
    assert duration_text(seconds) == text
