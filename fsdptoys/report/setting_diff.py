"""Compare settings and environments of rows: which differ, and the headings of settings in tables.

A setting whose switch is off, such as the buckets of a disabled offload, counts as missing.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fsdptoys.config.declared_options import without_switched_off
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.resume_log import flatten
from fsdptoys.sweep.folder import JOB_FILE, read_job
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import value_text

from .runs_table import Record

RANKS = "ranks"  # Pseudo-key for the world size, which the launch determines

HEADINGS = {
    "model.name": "Model",
    "parallel.name": "Strategy",
    RANKS: "Ranks",
    "mesh.fsdp_size": "FSDP size",
    "train.batch_size": "Batch",
    "train.grad_accum": "Micro-batches",
    "train.seq_len": "Sequence",
    "parallel.param_dtype": "Format",
    "parallel.wrap": "Wrapped Module",
    "memory.gradient_checkpointing": "Gradient Checkpointing",
    "memory.chunk_loss": "Chunked Loss",
    "memory.optimizer_offload": "Optimizer Offloading",
    "memory.cpu_offload": "CPU Offloading",
}
"""Settings that every table shows, as columns or above them."""

EXCLUDED = (
    "metrics.run_dir",
    "launch.device",
    "launch.nproc_per_node",
    "launch.nnodes",
    "launch.rdzv_endpoint",
    "launch.rdzv_token_file",
)
"""Settings left out: unique to each row, or implied by its hardware."""

SEEDS = ("train.init_seed", "train.data_seed", "train.sample_seed")
"""Settings whose default is ``train.seed``."""

PARTS = {
    "device": "device.name",
    "devices' type": "device.type",
    "processor": "machine.cpu",
    "cores": "machine.cpu_cores_of_this_process",
    "torch": "versions.torch",
    "CUDA": "versions.cuda",
    "HIP": "versions.hip",
    "CANN": "versions.cann",
    "Python": "versions.python",
    "fsdptoys": "versions.fsdptoys",
    "commit": "versions.fsdptoys_commit",
}
"""Factors of speed and memory other than settings → dotted key in ``environment.json``."""

Settings = dict[str, Any]  # Dotted key → value


def settings_of(record: Record) -> Settings:
    """Effective settings of a row; the command-line overrides of its job if no run was recorded."""
    if record.run is not None:
        return {RANKS: record.run.world_size} | effective(record.run.tree)
    varied = [f"{key}={text}" for key, text in (record.varied or {}).items()]
    settings = dict(
        _parse_override(word)
        for word in [*varied, *overrides_of(record)]
        if "=" in word
    )
    ranks = settings.get("launch.nproc_per_node")
    if isinstance(ranks, int) and ranks > 0:
        settings[RANKS] = ranks * settings.get("launch.nnodes", 1)
    return settings


def overrides_of(record: Record) -> list[str]:
    """Overrides that started a job of a sweep; empty for a single run. Its environment records the
    command."""
    with contextlib.suppress(ConfigError):
        if record.varied is not None and (record.path.parent / JOB_FILE).exists():
            return list(read_job(record.path.parent).overrides)
    return []


def effective(tree: Mapping[str, Any]) -> Settings:
    """Dotted keys and values of a configuration, without settings whose switch is off."""
    return without_switched_off(dict(flatten(dict(tree))))


def differing(rows: Sequence[Settings], varied: Sequence[str] = ()) -> list[str]:
    """Keys with several values among the rows that have them, in the order of the settings.

    Settings of models are compared within rows of one model name, since a name stands for dozens of
    sizes. Seeds that equal ``train.seed`` in all rows are left out, unless they are in ``varied``.
    """
    keys = []
    for key in dict.fromkeys(key for row in rows for key in row):
        of_model = key.startswith("model.") and key != "model.name"
        groups: dict[str, set[str]] = {}
        for row in rows:
            if key in row:
                model = value_text(row.get("model.name")) if of_model else ""
                groups.setdefault(model, set()).add(value_text(row[key]))
        follows = key in SEEDS and all(
            row.get(key) == row.get("train.seed") for row in rows
        )
        differs = any(len(texts) > 1 for texts in groups.values())
        if differs and key not in EXCLUDED and (key in varied or not follows):
            keys.append(key)
    return keys


def own_key(key: str) -> str:
    """Setting of a command-line key: a group, such as ``model``, stands for its ``name``."""
    return (
        f"{key}.name"
        if "." not in key
        and f"{key}.name" in (*HEADINGS, "data.name", "optim.name", "loss.name")
        else key
    )


def as_override(key: str, value: Any) -> str:
    """A setting as typed on the command line."""
    return f"{value_text(key.removesuffix('.name'))}={value_text(value)}"


def source_notes(records: Sequence[Record]) -> list[str]:
    """One sentence listing the differences between the sources of rows; empty if there are none."""
    differences = []
    for part, key in PARTS.items():
        values: dict[str, list[str]] = {}
        for record in records:
            if record.run is not None:
                value = value_text(str(look_up(record.run.environment, key)))
                values.setdefault(value, []).append(record.name)
        if len(values) > 1:
            listed = ", ".join(
                f"{value} ({', '.join(rows)})" for value, rows in values.items()
            )
            differences.append(f"{part} {listed}")
    note = (
        "Rows come from different environments, so their times and memory may "
        "not be comparable: "
    )
    return [f"{note}{'; '.join(differences)}."] if differences else []


def _parse_override(word: str) -> tuple[str, Any]:
    key, _, text = word.partition("=")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return own_key(key), kind(text)
    return own_key(key), {"true": True, "false": False, "null": None}.get(text, text)
