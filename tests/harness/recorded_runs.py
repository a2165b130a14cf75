"""Run directories, trained or written with chosen numbers."""

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fsdptoys.config.schema import Config
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.parallel import FSDP2Config
from fsdptoys.report.runs_table import Record
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.train.trainer import Trainer
from tests.harness import recording
from tests.harness.tiny import make_config

STEP = replace(recording.STEP, loss=5.0, learning_rate=1e-2)

GPU_STEP = replace(
    STEP,
    mfu=0.4,
    memory_allocated_gib=1.0,
    memory_peak_gib=2.0,
    memory_reserved_gib=3.0,
)

ENVIRONMENT = {
    "started_at": "2026-01-01T00:00:00+00:00",
    "command": "fsdptoys train",
    "world_size": 2,
    "device": {
        "type": "cpu",
        "name": "A processor",
        "count_on_this_machine": 1,
        "memory_gib": 16.0,
    },
    "versions": {
        "fsdptoys": "0.1.0",
        "fsdptoys_commit": None,
        "python": "3.11.7",
        "torch": "2.13.0",
        "cuda": None,
    },
    "machine": {"cpu": "A processor", "cpu_cores_of_this_process": 2},
}


DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""In C, where PyYAML has that: these tests write some hundred runs."""


@functools.cache
def plain_tree() -> dict[str, Any]:
    """Settings of a small run on two ranks."""
    return make_config(FSDP2Config(), 2, deterministic=False).to_dict()


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with other values at dotted keys."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = functools.reduce(
            lambda part, name: part.setdefault(name, {}), sections, tree
        )
        section[last] = value
    return tree


def run_of(count: int, step: StepMetrics = STEP) -> list[StepMetrics]:
    """Steps; the loss falls by a tenth a step and the time grows by 10 ms; the first two are
    slow."""
    return [
        replace(
            step,
            step=n,
            loss=step.loss - 0.1 * n,
            step_time_seconds=9.0 if n <= 2 else 0.1 + 0.01 * n,
        )
        for n in range(1, count + 1)
    ]


def write_run(
    path: Path,
    steps: Sequence[StepMetrics],
    settings: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    finished: bool = True,
    prediction: Prediction | None = None,
) -> Path:
    """Write a run directory with unusual settings and parts of the environment, by dotted keys."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.dump(changed(plain_tree(), settings or {}), Dumper=DUMPER)
    )
    (path / "environment.json").write_text(
        json.dumps(changed(ENVIRONMENT, environment or {}))
    )
    (path / "metrics.jsonl").write_text(
        "".join(f"{step.to_json()}\n" for step in steps)
    )
    if finished:
        (path / "summary.md").write_text("# done\n")
    if prediction is not None:
        (path / "prediction.json").write_text(json.dumps(prediction.to_dict()))
    return path


def record_of(
    path: Path, status: JobStatus = JobStatus.completed, **more: Any
) -> Record:
    """The row of a run directory."""
    run = read_recorded_run(path) if path.exists() else None
    return Record(more.pop("name", path.name), path, status, run, **more)


def write_records(folder: Path, **runs: Sequence[Any]) -> list[Record]:
    """Write runs, each from its arguments of ``write_run`` after the path, and return their
    rows."""
    return [
        record_of(write_run(folder / name, *arguments))
        for name, arguments in runs.items()
    ]


def train_into(folder: Path, configs: dict[str, Config]) -> None:
    """Train each configuration as one of the ranks, and write its steps into a run directory of its
    name."""
    for name, config in configs.items():
        trainer = Trainer(config)
        trainer.train()
        if trainer.world.rank == 0:
            write_run(
                folder / name,
                trainer.history,
                config.to_dict(),
                {"world_size": trainer.world.world_size},
            )
