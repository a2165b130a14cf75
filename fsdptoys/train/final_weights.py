"""The trained weights, which a run writes at its end."""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from fsdptoys.checkpoint import WEIGHTS_FOLDER, save_weights
from fsdptoys.checkpoint.adapter_export import ADAPTER_FOLDER, merged, write_adapter
from fsdptoys.config.schema import Config
from fsdptoys.models.lora import adapted_layers
from fsdptoys.parallel import Strategy
from fsdptoys.tune import LoRAConfig


def save_final_weights(config: Config, strategy: Strategy, run_dir: Path) -> None:
    """Gather the trained weights and write them from rank 0. A collective.

    Existing weights stay: they are current, since no step was taken since.
    """
    parameters = strategy.full_parameters()
    tune = config.tune
    adapters: dict[str, Tensor] = {}
    if isinstance(tune, LoRAConfig):
        with torch.device("meta"):
            layers = adapted_layers(config.model.build(), tune.targets)
        parameters = merged(parameters, tune.alpha / tune.rank, adapters, layers)
    weights = itertools.chain(parameters, strategy.full_buffers())
    folder = run_dir / WEIGHTS_FOLDER
    if strategy.world.rank > 0 or folder.exists():
        for _ in weights:
            pass  # this rank's part of the gathering
        return
    save_weights(folder, weights)
    if isinstance(tune, LoRAConfig):
        write_adapter(
            run_dir / ADAPTER_FOLDER,
            adapters,
            config.model,
            rank=tune.rank,
            alpha=tune.alpha,
            dropout=tune.dropout,
        )


def set_weights_aside(run_dir: Path) -> None:
    """Rename final weights of an earlier end of the run, which will no longer be its last step."""
    folder = run_dir / WEIGHTS_FOLDER
    names = (
        folder.with_name(f"{WEIGHTS_FOLDER}-{number}") for number in itertools.count(1)
    )
    if folder.exists():
        folder.rename(next(name for name in names if not name.exists()))
