"""Parameters by level: the short level leaves out those marked extended."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def extended(*values: Any, **options: Any) -> Any:
    """Return one set of parameters that only ``--all`` runs."""
    return pytest.param(*values, marks=pytest.mark.extended, **options)


def by_level(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Return all values as parameters; the short level runs those in ``short``."""
    return [value if value in short else extended(value) for value in values]
