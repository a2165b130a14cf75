"""Run directories with the weights of a random model."""

import dataclasses
from pathlib import Path

import yaml
from torch import Tensor

from fsdptoys.checkpoint import save_weights
from fsdptoys.config.schema import Config
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import SingleConfig
from tests.harness.folders import build
from tests.harness.tiny import make_config

FILE_BYTES = 60_000
"""Small enough for several files in every case."""


def save_run(
    run: Path, config: ModelConfig, max_file_bytes: int = FILE_BYTES
) -> dict[str, Tensor]:
    """A run's directory with the weights of a random model; returns them."""
    parameters = {
        name: param.detach() for name, param in build(config).named_parameters()
    }
    write_config(run, config)
    save_weights(run / "weights", iter(parameters.items()), max_file_bytes)
    return parameters


def write_config(run: Path, config: ModelConfig) -> None:
    settings: Config = dataclasses.replace(make_config(SingleConfig(), 1), model=config)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(
        yaml.safe_dump(settings.to_dict(), sort_keys=False)
    )
