"""Steps of runs, and recorders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdptoys.metrics import (
    Console,
    MetricsConfig,
    ResumePoint,
    RunRecorder,
    StepMetrics,
)
from fsdptoys.metrics.layout import Layout
from fsdptoys.metrics.step import RoutingMetrics

STEP = StepMetrics(
    1, 5.5, 1.0, 1e-3, 0.1, 512, 5120.0, 0.1, None, None, None, None, 0.5, 0.75
)
GPU_STEP = replace(
    STEP,
    mfu=0.4,
    memory_allocated_gib=1.0,
    memory_peak_gib=2.0,
    memory_reserved_gib=3.0,
)
ROUTING = RoutingMetrics(
    aux_loss=2.1,
    z_loss=3.5,
    entropy=0.9,
    max_load=1.8,
    min_load=0.25,
    counts=[[7, 1, 4, 4]],
)
TREE = {"model": {"dim": 64, "norm": {"eps": 1e-5}}, "train": {"seed": None}}
ENVIRONMENT = {
    "world_size": 2,
    "device": {"name": "paper", "type": "cpu"},
    "versions": {"torch": "2"},
}


def open_recorder(
    resumed: ResumePoint | None = None,
    run_dir: Path | str | None = "run",
    tree: dict[str, Any] = TREE,
    steps: int = 40,
    environment: dict[str, Any] = ENVIRONMENT,
    references: dict[str, float] | None = None,
    layout: Layout | None = None,
    defaults: Mapping[str, Any] = {},
    options: Mapping[str, Any] = {},
    **settings: Any,
) -> RunRecorder:
    """Open a recorder of a run of ``steps`` steps; ``settings`` are those of its
    ``MetricsConfig``, ``options`` those of its writers."""
    settings = {"console": Console.none, "log_every": 10} | settings
    config = MetricsConfig(
        run_dir=None if run_dir is None else str(run_dir), **settings
    )
    start = config, "tiny", tree, environment, steps, references or {}, resumed
    return RunRecorder(*start, layout=layout, defaults=defaults, writers=options)
