"""Parsers of foreign JSON and YAML."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from fsdptoys.utils.foreign import MAX_DEPTH, MAX_YAML_BYTES, ForeignError, parse_json, parse_yaml


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (parse_json, "[" * 200_000, "nested more than"),
        (parse_json, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than"),
        (parse_json, '{"a": ' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1), "nested more than"),
        (parse_json, '{"loss": 1' + "0" * 400 + "}", "more than 300 digits"),
        (parse_json, "9" * 5000, "digits"),
        (parse_json, b"\xff", "utf-8"),
        (parse_json, '"\\ud800"', "surrogates"),
        (parse_json, "NaN", "holds NaN"),
        (parse_json, '{"loss": 1e400}', "too large"),
        (parse_json, "[-1E+0999]", "too large"),
        (parse_json, "", "Expecting value"),
        (parse_yaml, "a: &a {b: *a}", "alias"),
        (parse_yaml, "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]", "alias"),
        (parse_yaml, "a: &a {x: 1}\nb: {<<: *a}", "alias"),
        (parse_yaml, "[" * (MAX_DEPTH + 1), "nested more than"),
        (parse_yaml, "- " * 500_000, "nested more than"),
        (parse_yaml, "!!python/object/apply:os.system [true]", "tag"),
        (parse_yaml, "a: !!int 1:59", "tag"),
        (parse_yaml, "? [a]\n: b", "unhashable"),
        (parse_yaml, "a: 0b_", "invalid literal"),
        (parse_yaml, "a: " + "9" * 5000, "digits"),
        (parse_yaml, "a: [{b: 0x" + "f" * 300 + "}]", "more than 300 digits"),
        (parse_yaml, b"\xff\xfe\x00", "unacceptable"),
        (parse_yaml, "#" * (MAX_YAML_BYTES + 1), "longer than"),
        (parse_yaml, "a: [1", "did not find expected"),
    ],
)
def test_hostile_text_raises_one_printable_sentence(parse: Callable[[str], Any], text: str, reason: str) -> None:
    """Oracle: one line with the reason; the plain parsers raise RecursionError or exhaust memory."""
    with pytest.raises(ForeignError) as caught:
        parse(text)
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("parse", "text", "key"), [(parse_json, '{"a": 1, "a": 2}', "a"), (parse_yaml, "{x: {b: 1, b: 2}}", "b")]
)
def test_duplicate_keys_are_refused_on_request(parse: Callable[..., Any], text: str, key: str) -> None:
    """Oracle: the message; without the option the last value wins, as in Python and PyYAML."""
    parse(text)
    with pytest.raises(ForeignError, match=f"{key} occurs twice"):
        parse(text, unique_keys=True)


def test_valid_json_is_parsed_like_python() -> None:
    """Oracle: literal values, emoji as a pair of escaped surrogates, 300 digits in a string."""
    text = '{"a": [1, 2.5, null, true, "\\ud83d\\ude00"], "b": {"c": "' + "7" * 300 + '"}}'
    assert parse_json(text) == {"a": [1, 2.5, None, True, "😀"], "b": {"c": "7" * 300}}
    assert math.isnan(parse_json("NaN", non_finite=True))


def test_yaml_of_a_run_round_trips() -> None:
    """Oracle: ``yaml.safe_dump``; values that plain YAML reads as base-60 numbers, dates or booleans are quoted."""
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
    """Oracle: YAML 1.2, which has neither; PyYAML computes 5,400 and takes minutes for 600 KB of them."""
    long = "1" + ":59" * 200_000
    assert parse_yaml(f"a: 1:30:00\nb: 2001-99-99\nc: {long}\nd: 1:30.5") == {
        "a": "1:30:00",
        "b": "2001-99-99",
        "c": long,
        "d": "1:30.5",
    }
