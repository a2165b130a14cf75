"""Where rows come from: machine, device and versions, and whether their times and memory compare at all."""

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
"""What decides about speed and memory beside the settings → its place in ``environment.json``."""


def source_of(environment: dict[str, Any]) -> dict[str, Any]:
    """What of an environment decides whether numbers compare; None where it does not tell."""
    found = {}
    for name, (section, key) in PARTS.items():
        part = environment.get(section)
        value = part.get(key) if isinstance(part, dict) else None
        if name == "commit" and isinstance(value, str):
            value = re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}", r"\1", value)
        found[name] = value
    return found


def source_fingerprint(environment: dict[str, Any]) -> str:
    """The same number for rows whose times and memory compare."""
    return hashlib.sha256(json.dumps(source_of(environment), sort_keys=True).encode()).hexdigest()[:12]


def source_notes(records: Sequence[Record]) -> list[str]:
    """One sentence where rows come from different places, with who comes from where."""
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
        "Rows come from different places, so their times and memory may not compare: " + "; ".join(differences) + "."
    ]
