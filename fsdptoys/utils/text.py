"""Text that this project prints and did not write itself, and printing to a console that may be gone."""

import contextlib
import difflib
import sys
from collections.abc import Sequence
from typing import IO


def near_miss(word: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The name that the word was most likely meant to be; ``cutoff`` is the least likeness, 0 to 1."""
    matches = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return matches[0] if matches else None


LONGEST_LINE = 300


def printable(text: str, stream: "IO[str] | None" = None) -> str:
    """Text without characters that steer a terminal: escape sequences, carriage returns, right-to-left marks.

    Args:
        text: from anywhere; a model may write anything, and so may the author of a file.
        stream: where it goes; what its encoding cannot hold is escaped too.

    Returns:
        The text with each such character as Python would write it (``\\x1b``); newlines and tabs stay.
    """
    shown = "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )
    if stream is None:
        return shown
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: object, longest: int | None = LONGEST_LINE) -> str:
    """The same on one line of limited length, for a sentence that quotes it or a cell of a table.

    Args:
        text: a string, or an exception.
        longest: characters of the line; None for any number.
    """
    shown = printable(" ".join(str(text).split()))
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 1]}…"


def encodable(text: str, stream: "IO[str] | None") -> str:
    """Text of the same length that a stream's encoding can hold, for what is laid out in columns already."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("–", "-").encode(encoding, "replace").decode(encoding)
    return text


def say(sentence: str, *, stdout: bool = False) -> bool:
    """Print ``fsdptoys: SENTENCE``, and go on where nobody can read it: disk full, pipe without reader, stream closed.

    Args:
        sentence: may quote foreign text.
        stdout: print it there, and not on stderr.

    Returns:
        Whether it was printed.
    """
    stream = sys.stdout if stdout else sys.stderr
    if stream is None:  # closed when this process started
        return False
    try:
        print(f"fsdptoys: {printable(sentence, stream)}", file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: the stream has been closed since
        # What stays in the buffer would fail again when the interpreter ends, which turns its status into 120.
        with contextlib.suppress(OSError, ValueError):
            stream.close()
        return False
    return True
