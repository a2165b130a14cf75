"""Foreign text: parsers of JSON and YAML, dataclasses built from their values, escaped output, and
lost consoles."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

import fsdptoys
from fsdptoys.utils.foreign import (
    MAX_DEPTH,
    MAX_YAML_BYTES,
    ForeignError,
    parse_json,
    parse_yaml,
)
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.text import one_line, printable
from tests.harness.streams import run_with


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (parse_json, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than"),
        (
            parse_json,
            '{"a": ' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1),
            "nested more than",
        ),
        (parse_json, '{"loss": 1' + "0" * 400 + "}", "more than 300 digits"),
        (parse_json, "9" * 5000, "digits"),
        (parse_json, b"\xff", "utf-8"),
        (parse_json, '"\\ud800"', "surrogates"),
        (parse_json, "NaN", "holds NaN"),
        (parse_json, '{"loss": 1e400}', "too large"),
        (parse_json, "", "Expecting value"),
        (parse_yaml, "a: &a {b: *a}", "alias"),
        (parse_yaml, "a: &a {x: 1}\nb: {<<: *a}", "alias"),
        (parse_yaml, "[" * (MAX_DEPTH + 1), "nested more than"),
        (parse_yaml, "!!python/object/apply:os.system [true]", "tag"),
        (parse_yaml, "? [a]\n: b", "unhashable"),
        (parse_yaml, "a: 0b_", "invalid literal"),
        (parse_yaml, "a: [{b: 0x" + "f" * 300 + "}]", "more than 300 digits"),
        (parse_yaml, b"\xff\xfe\x00", "unacceptable"),
        (parse_yaml, "#" * (MAX_YAML_BYTES + 1), "longer than"),
        (parse_yaml, "a: [1", "did not find expected"),
    ],
)
def test_hostile_text_raises_one_printable_sentence(
    parse: Callable[[str], Any], text: str, reason: str
) -> None:
    """Oracle: one line with the reason; the plain parsers raise RecursionError or exhaust
    memory."""
    with pytest.raises(ForeignError) as caught:
        parse(text)
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_duplicate_keys_are_refused() -> None:
    """Oracle: the message; in JSON the last value wins without the option, as in Python."""
    text = '{"a": 1, "a": 2}'
    assert parse_json(text) == {"a": 2}
    with pytest.raises(ForeignError, match="a occurs twice"):
        parse_json(text, unique_keys=True)
    with pytest.raises(ForeignError, match="b occurs twice"):
        parse_yaml("{x: {b: 1, b: 2}}")


def test_valid_json_is_parsed_like_python() -> None:
    """Oracle: literal values, emoji as a pair of escaped surrogates, 300 digits in a string."""
    text = (
        '{"a": [1, 2.5, null, true, "\\ud83d\\ude00"], "b": {"c": "' + "7" * 300 + '"}}'
    )
    assert parse_json(text) == {"a": [1, 2.5, None, True, "😀"], "b": {"c": "7" * 300}}
    assert math.isnan(parse_json("NaN", non_finite=True))


def test_yaml_of_a_run_round_trips() -> None:
    """Oracle: ``yaml.safe_dump``; values that plain YAML reads as base-60 numbers, dates or
    booleans are quoted."""
    tree = {
        "a": 1e-05,
        "b": "1:30",
        "c": "2001-01-01",
        "d": [None, True, "yes", "0x10", -3, 1.5],
        "e": {"f": "line\nline", "g": "\x1b[31m"},
        "h": "ü",
    }
    assert parse_yaml(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)) == tree


def test_numbers_in_base_60_and_dates_stay_text() -> None:
    """Oracle: YAML 1.2, which has neither; PyYAML computes 5,400 and takes minutes for 600 KB of
    them."""
    long = "1" + ":59" * 200_000
    assert parse_yaml(f"a: 1:30:00\nb: 2001-99-99\nc: {long}\nd: 1:30.5") == {
        "a": "1:30:00",
        "b": "2001-99-99",
        "c": long,
        "d": "1:30.5",
    }


class Color(Enum):
    """An enum of two values."""

    red = "red"
    one = 1


@dataclass(frozen=True)
class Inner:
    """A nested dataclass."""

    value: float


@dataclass(frozen=True)
class Outer:
    """A dataclass with one field of each kind."""

    number: int
    labels: tuple[str, ...]
    inner: Inner
    color: Color = Color.red
    maybe: float | None = None
    sizes: dict[Color, int] = field(default_factory=dict)
    flag: bool = False
    anything: Any = None
    parts: list[Inner] = field(default_factory=list)


WHOLE = {"number": 1, "labels": ["a"], "inner": {"value": 2}}


def test_plain_values_are_converted_to_the_annotated_types() -> None:
    """Oracle: the same object, built by hand."""
    tree = {
        **WHOLE,
        "color": 1,
        "maybe": 3,
        "sizes": {"red": 4},
        "flag": True,
        "anything": [[]],
        "parts": [{"value": 1.5}],
    }
    assert build(Outer, tree) == Outer(
        1, ("a",), Inner(2.0), Color.one, 3.0, {Color.red: 4}, True, [[]], [Inner(1.5)]
    )
    assert build(Outer, WHOLE) == Outer(1, ("a",), Inner(2.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "number is true"),
        ({"number": 2**63}, "number is 9223372036854775808"),
        ({"labels": "ab"}, "labels is 'ab'"),
        ({"labels": ["a", 1]}, "labels[1] is 1"),
        ({"inner": {"value": float("inf")}}, "inner.value is inf"),
        ({"inner": {"value": 10**400}}, "inner.value is 1"),
        ({"inner": {}}, "inner.value is missing"),
        ({"color": True}, "color is true"),
        ({"sizes": {"blue": 1}}, "a key of sizes is 'blue'"),
        ({"sizes": {"red": "\x1b[2J"}}, "sizes.red is '\\x1b[2J'"),
        ({"flag": 1}, "flag is 1"),
        ({"\x1b": 1}, "the key '\\x1b'"),
    ],
)
def test_values_of_the_wrong_type_are_named(
    change: dict[str, Any], reason: str
) -> None:
    """Oracle: the expected message, on one line without control characters."""
    with pytest.raises(ForeignError) as caught:
        build(Outer, {**WHOLE, **change})
    assert reason in str(caught.value) and str(caught.value).isprintable()


ROOT = Path(fsdptoys.__file__).parent

CALLS = re.compile(
    r"\b(json|yaml|pickle|marshal|torch)\.(load|loads|safe_load|full_load|unsafe_load)\("
    r"|\bpickle\.Unpickler\)"
)

OWN_FILES = {
    "checkpoint/dcp_folder.py": (
        "tensors alone (weights_only), in an archive that is as large as it says"
    ),
    "data/json_lines.py": (
        "one field of a row of bounded length, eight times as fast; errors name the row"
    ),
    "launch/failures.py": "written by this launcher's ranks into a folder of mode 0700",
    "train/launch_env.py": "an environment variable that this rank's launcher has set",
    "launch/rendezvous/signed_state.py": (
        "the state that torch's rendezvous pickled in this process"
    ),
    "report/figures_plotly.py": "made by plotly in this process",
    "report/memory_timeline.py": "an unpickler that makes plain values alone",
    "utils/foreign.py": "the parsers themselves",
    "launch/worker.py": "handed over by this rank's launcher, in a folder of mode 0700",
}


def test_foreign_text_is_parsed_in_one_place() -> None:
    """Oracle: the source files; parsers of the standard library and PyYAML are unbounded."""
    calls = {}
    for path in ROOT.rglob("*.py"):
        match = CALLS.search(path.read_text(encoding="utf-8"))
        if match is not None:
            calls[str(path.relative_to(ROOT))] = match[0]
    assert sorted(calls) == sorted(OWN_FILES), {
        name: call for name, call in calls.items() if name not in OWN_FILES
    }


def test_control_characters_are_escaped() -> None:
    """Oracle: Python's own escapes, for colors, titles, carriage returns, right-to-left marks and
    lone surrogates."""
    assert (
        printable("a\x1b[31mb\x1b]0;t\x07\rc\u202ed\ud800")
        == "a\\x1b[31mb\\x1b]0;t\\x07\\rc\\u202ed\\ud800"
    )
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
    child = run_with(stream, "fine", ["-c", PRINT_STATUS])
    assert (child.returncode, child.stderr) == (3 if stream == "fine" else 4, "")
