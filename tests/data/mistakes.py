"""Mistakes in data settings with the sentences that answer them."""

from pathlib import Path

import pytest
import yaml


def mistakes(section: str) -> list[object]:
    """Return the mistakes of a section of ``mistakes.yaml``, and their sentences."""
    tree = yaml.safe_load(
        Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8")
    )
    return [
        pytest.param(row["typed"], row["says"], id=str(row["typed"]))
        for row in tree[section]
    ]
