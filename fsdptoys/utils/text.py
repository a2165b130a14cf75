"""Text for messages: escaping of foreign text, formatting of values and sizes, and printing that
never fails."""

import contextlib
import difflib
import math
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import IO, Any

LONGEST_LINE = 300


def near_miss(word: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the closest of the names, if its similarity (0 to 1) is at least ``cutoff``."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), None)


def suggestion(
    word: str, names: Sequence[str], otherwise: str, prefix: str = ""
) -> str:
    """Return the fix in a message on an unknown name: the closest name after ``prefix``, or
    ``otherwise``."""
    near = near_miss(word, names)
    return f"did you mean {prefix}{near}?" if near else otherwise


def value_text(value: Any, *, quote: bool = False) -> str:
    """Return a setting's value (None, bool, number, text, enum or list) as typed on the command
    line.

    ``quote`` returns text unchanged, with quotes if the command line would parse it, instead of on
    one line.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value_text(value.value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(value_text(element, quote=quote) for element in value)}]"
    if quote:
        return str(value) if re.fullmatch(r"[\w.:/+-]+", str(value)) else f"'{value}'"
    return one_line(value, longest=None)


class _JsonRepr(reprlib.Repr):
    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()


_JSON = _JsonRepr()


def wrapped(text: str, stream: "IO[str]") -> str:
    """Break lines between words where ``stream`` is a terminal, which would break them within;
    others stay as they are.

    After a label and two spaces, further lines begin below the text.
    """
    try:
        if not stream.isatty():
            return text
        width = (
            int(os.environ.get("COLUMNS") or 0)
            or os.get_terminal_size(stream.fileno()).columns
        )
    except (OSError, ValueError):  # closed, or no file
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        label = re.match(r"\S[\S ]{0,30}?  +(?=\S)|", line)
        indent = " " * (label.end() if label else 0)
        room = max(width, 2 * len(indent) + 1)
        lines += textwrap.wrap(
            line,
            room,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def short_text(value: object) -> str:
    """Return a foreign value of any type, shortened to fit into a sentence; None, True and False as
    in JSON."""
    return one_line(_JSON.repr(value))


UNITS = {
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "EiB": 2**60,
}
"""Unit → its bytes."""


def fitting_unit(count: float) -> tuple[str, int]:
    """Return the largest unit up to TiB in which ``count`` bytes are at least 1, and the bytes of
    that unit."""
    fitting = [
        (unit, size)
        for unit, size in UNITS.items()
        if UNITS["TiB"] >= size <= abs(count)
    ]
    return fitting[-1] if fitting else ("bytes", 1)


def size_text(count: int) -> str:
    """``count`` bytes in the unit that fits."""
    unit, size = fitting_unit(count)
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count} bytes"


def gib_text(gib: float) -> str:
    """Return a size in GiB in the unit that fits."""
    return size_text(round(gib * 2**30)) if math.isfinite(gib * 2**30) else f"{gib} GiB"


def duration_text(seconds: float) -> str:
    """Return days, hours, minutes and seconds; seconds alone if they are more than a timedelta
    holds, or not finite."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except (OverflowError, ValueError):
        return f"{seconds:g} s"


def counted(count: int, noun: str) -> str:
    """Return ``1 step`` or ``2,000 steps``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str, stream: "IO[str] | None" = None) -> str:
    """Escape characters that control a terminal (as ``\\x1b``): escape sequences, right-to-left
    marks.

    Newlines and tabs stay. Characters outside the encoding of a destination ``stream`` are escaped
    too.
    """
    escaped = "".join(
        char
        if char.isprintable() or char in "\n\t"
        else char.encode("unicode_escape").decode()
        for char in text
    )
    if stream is None:
        return escaped
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: object, longest: int | None = LONGEST_LINE) -> str:
    """Printable text of a string or an exception on one line of at most ``longest`` characters."""
    line = printable(" ".join(str(text).split()))
    return (
        line if longest is None or len(line) <= longest else f"{line[: longest - 1]}…"
    )


def encodable(text: str, stream: "IO[str] | None") -> str:
    """Text in a stream's encoding with its length unchanged, for aligned columns."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("–", "-").encode(encoding, "replace").decode(encoding)
    return text


def print_status(sentence: str, *, stdout: bool = False) -> bool:
    """Print ``fsdptoys: SENTENCE``; return whether it was printed, as a full disk raises nothing.

    On a terminal, lines of stdout end between words. Those of stderr are not broken, since their
    commands are pasted.
    """
    stream = sys.stdout if stdout else sys.stderr
    if stream is None:  # closed when this process started
        return False
    try:
        text = f"fsdptoys: {printable(sentence, stream)}"
        print(wrapped(text, stream) if stdout else text, file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: the stream has been closed since
        # A failed flush of the buffer at the interpreter's exit would change the exit status to
        # 120.
        with contextlib.suppress(OSError, ValueError):
            stream.close()
        return False
    return True
