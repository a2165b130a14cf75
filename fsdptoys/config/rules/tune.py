"""Adapters against model, strategy and formats."""

from typing import cast

import torch

from fsdptoys.checkpoint import hugging_face_format
from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.config.sections import Sections
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.layers import Linear
from fsdptoys.models.nf4 import BLOCK
from fsdptoys.tune import LoRAConfig, TuneConfig
from fsdptoys.utils.text import short_text

from .rule import Rules, Where

TUNE = Rules()


def _linear_layers(config: Sections) -> dict[str, Linear]:
    """Return the linear layers of the blocks, by name."""
    with torch.device("meta"):
        layers = config.model.build().layers
    return {
        name: module
        for name, module in layers.named_modules()
        if type(module) is Linear
    }


@TUNE.rule("tune.targets")
def targets_are_layers(config: Sections, where: Where) -> str | None:
    """Adapters are added to linear layers of the blocks."""
    tune = cast(LoRAConfig, config.tune)
    layer_names = {name.rpartition(".")[2] for name in _linear_layers(config)}
    missing = [target for target in tune.targets if target not in layer_names]
    if not missing:
        return None
    targets = [target for target in tune.targets if target in layer_names] or sorted(
        layer_names
    )
    return (
        f"tune.targets names {missing[0]}, which is no linear layer of the blocks of a "
        f"{config.model.family} model; set tune.targets=[{','.join(targets)}]"
    )


TUNE.exclude(
    "tune=lora",
    "parallel.use_orig_params=false",
    says="tune=lora trains some parameters of a unit, which {parallel} makes one flat one with "
    "parallel.use_orig_params=false; set parallel.use_orig_params=true",
)
TUNE.exclude(
    "tune=lora",
    "train.float8",
    says="{train.float8} converts linear layers, to which tune=lora adds; set train.float8=none",
)
TUNE.exclude(
    "tune.base=nf4",
    "train.deterministic=layout",
    says=(
        "tune.base=nf4 packs weights that train.deterministic=layout computes with in float64; "
        "set tune.base=plain or train.deterministic=true"
    ),
)


TUNE.exclude(
    "tune.base=nf4",
    "memory.cpu_offload=true",
    says=(
        "tune.base=nf4 packs weights on the device, and memory.cpu_offload=true keeps them in "
        "host memory; set memory.cpu_offload=false or tune.base=plain"
    ),
)


@TUNE.rule("tune.base=nf4")
def blocks_divide_rows(config: Sections, where: Where) -> str | None:
    """NF4 has a scale for each block of a row."""
    for name, module in _linear_layers(config).items():
        if module.in_features % BLOCK:
            return (
                f"tune.base=nf4 scales blocks of {BLOCK} elements, which do not divide the "
                f"{module.in_features} columns of layers.{name}; set tune.base=plain"
            )
    return None


@TUNE.rule("tune=lora")
def adapters_are_whole(config: Sections, where: Where) -> str | None:
    """Split layers take no adapters."""
    ranks = where.axes.tp
    slices = config.train.slices
    if ranks == slices == 1:
        return None
    key, value = ("mesh.tp_size", ranks) if ranks > 1 else ("train.slices", slices)
    return f"tune=lora adds to the layers that {key}={value} splits; set {key}=1 or tune=full"


def open_adapter(tune: TuneConfig, model: DecoderModel) -> AdapterFolder | None:
    """Open the folder of ``tune.adapter``, if any, and check that it fits the run.

    Args:
        tune: the run's.
        model: on the meta device, without adapters.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if not isinstance(tune, LoRAConfig):
        return None
    hugging_face_format(model.config)  # of the adapter that the run writes
    if tune.adapter is None:
        return None
    key = "tune.adapter"
    try:
        folder = AdapterFolder(tune.adapter)
        folder.check(model)
    except ConfigError as error:
        raise ConfigError(f"{key}={error}") from error
    folder.check_run(key, tune.rank, tune.alpha, tune.targets, model)
    if model.config.init_from is None and folder.base is not None:
        raise ConfigError(
            f"{key}={tune.adapter} was trained on {short_text(folder.base)}, and "
            "model.init_from=null draws other weights; set model.init_from to a folder with that "
            "model"
        )
    return folder
