"""Machine, device and versions of each row, which decide whether times and memory are comparable."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from fsdptoys.utils.text import value_text

from .runs_table import Record

PARTS = {
    "device": ("device", "name"),
    "devices' type": ("device", "type"),
    "processor": ("machine", "cpu"),
    "cores": ("machine", "cpu_cores_of_this_process"),
    "torch": ("versions", "torch"),
    "CUDA": ("versions", "cuda"),
    "HIP": ("versions", "hip"),
    "CANN": ("versions", "cann"),
    "Python": ("versions", "python"),
    "fsdptoys": ("versions", "fsdptoys"),
    "commit": ("versions", "fsdptoys_commit"),
}
"""Factors of speed and memory other than settings → section and key in ``environment.json``."""


def source_of(environment: dict[str, Any]) -> dict[str, Any]:
    """Values of ``PARTS`` in an environment; None for missing ones."""
    found = {}
    for name, (section, key) in PARTS.items():
        part = environment.get(section)
        value = part.get(key) if isinstance(part, dict) else None
        if name == "commit" and isinstance(value, str):
            value = re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}", r"\1", value)
        found[name] = value
    return found


def source_fingerprint(environment: dict[str, Any]) -> str:
    """Hash of :func:`source_of`, equal for rows with comparable times and memory."""
    return hashlib.sha256(json.dumps(source_of(environment), sort_keys=True).encode()).hexdigest()[:12]


def source_notes(records: Sequence[Record]) -> list[str]:
    """One sentence listing the differences between the sources of rows; empty if there are none."""
    sources = {record.name: source_of(record.run.environment) for record in records if record.run is not None}
    differences = []
    for part in PARTS:
        values: dict[str, list[str]] = {}
        for name, source in sources.items():
            values.setdefault(value_text(str(source[part])), []).append(name)
        if len(values) > 1:
            differences.append(f"{part} " + ", ".join(f"{value} ({', '.join(rows)})" for value, rows in values.items()))
    if not differences:
        return []
    return [
        "Rows come from different environments, so their times and memory may not be comparable: "
        + "; ".join(differences)
        + "."
    ]
