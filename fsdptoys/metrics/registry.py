"""Writers by name."""

import os
from collections.abc import Mapping

from fsdptoys.register import registry

from .config import WANDB_FOLDER, MetricsConfig, WandbMode
from .csv_writer import CSVConfig
from .mlflow_writer import MLflowConfig
from .trackio_writer import TrackioConfig
from .wandb_account import check_wandb, wandb_mode
from .writer import Writer, WriterConfig
from .writers import TensorBoardConfig, WandbConfig, WandbWriter

WRITERS: Mapping[str, type[WriterConfig]] = registry(
    "writers",
    {
        config.name: config
        for config in (
            TensorBoardConfig,
            WandbConfig,
            CSVConfig,
            MLflowConfig,
            TrackioConfig,
        )
    },
)
"""The word in ``metrics.writers`` → configuration class, also those that own code registers."""


def build_writers(
    config: MetricsConfig, options: Mapping[str, WriterConfig]
) -> list[Writer]:
    """Construct the configured writers; their packages are imported when they start.

    Args:
        config: names the writers.
        options: name → settings; a missing one has its defaults.
    """
    writers: list[Writer] = []
    for name in config.writers:
        if name != WANDB_FOLDER:
            writers.append((options.get(name) or WRITERS[name]()).build())
        elif (mode := wandb_mode(config, os.environ)) is not WandbMode.disabled:
            writers.append(WandbWriter(config.wandb_project, config.wandb_entity, mode))
    return writers


def check_writers(
    config: MetricsConfig,
    environment: Mapping[str, str],
    options: Mapping[str, WriterConfig] = {},
) -> None:
    """Check that each writer can start here: its package is installed, and wandb has credentials
    for online mode."""
    for name in config.writers:
        (options.get(name) or WRITERS[name]()).check(environment)
    if WANDB_FOLDER in config.writers:
        check_wandb(config, environment)
