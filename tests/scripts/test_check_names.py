"""The check of names detects what it rejects."""

import ast

import pytest

from scripts.check_names import faults


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("found = 1", 1),
        ("def read(typed, *, path): ...", 1),
        ("for each in rows: each.place = 1", 2),
        ("def _kept(): ...", 1),
        ("import io as place", 1),
        ("a, b = 1, 2", 1),
        ("a, b = b, a", 0),
        ("a, b = divmod(7, 2)", 0),
        ("step, path = found.step, each", 1),
        ("foundry = placed = 1", 0),
    ],
)
def test_names_and_tuples_are_rejected(source: str, count: int) -> None:
    """Oracle: the table."""
    assert len(list(faults(ast.parse(source)))) == count
