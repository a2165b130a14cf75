"""Adapters against model, strategy and formats."""

import re
from collections.abc import Sequence
from typing import cast

import torch

from fsdptoys.checkpoint import weights_format
from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.config.sections import Sections
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.layers import Linear
from fsdptoys.models.lora import (
    adapted_layers,
    is_routed,
    linear_layers,
    match_layers,
)
from fsdptoys.models.nf4 import BLOCK
from fsdptoys.tune import LoRAConfig, TuneConfig
from fsdptoys.tune.config import LINEAR_LAYERS
from fsdptoys.utils.text import short_text, value_text

from .rule import Rules, Where

TUNE = Rules()

EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that peft replaces by stacked weights in models with experts."""


def _build(config: Sections) -> DecoderModel:
    with torch.device("meta"):
        model: DecoderModel = config.model.build()
    return model


@TUNE.rule("tune.targets")
def targets_are_layers(config: Sections, where: Where) -> str | None:
    """Adapters are added to linear layers of the blocks."""
    tune = cast(LoRAConfig, config.tune)
    model = _build(config)
    layers = linear_layers(model)
    layer_names = {name.rpartition(".")[2] for name in layers}
    is_family = all(type(layer.module) is Linear for layer in layers.values())
    if is_family:
        families = [target for target in tune.targets if target in LINEAR_LAYERS]
        for target in tune.targets:
            if target not in families:
                fix = f"set tune.targets={value_text(families or ['q_proj', 'v_proj'])}"
                return (
                    f"tune.targets names {target}, which is none of {', '.join(LINEAR_LAYERS)}; "
                    f"{fix}"
                )
    for target in tune.targets:
        try:
            re.compile(target)
        except re.error as error:
            return (
                f"tune.targets names {target}, which is neither the name of a layer nor a regular "
                f"expression ({error}); set tune.targets=[{','.join(sorted(layer_names))}]"
            )
    missing = [
        target for target in tune.targets if not match_layers(list(layers), target)
    ]
    if not missing:
        return None if is_family else _taken_for_experts(model, tune.targets)
    target = missing[0]
    targets = [target for target in tune.targets if target not in missing] or sorted(
        layer_names
    )
    fix = f"set tune.targets=[{','.join(targets)}]"
    names = [f"layers.{name}" for name, _ in model.layers.named_modules()]
    for name in match_layers(names, target):
        if is_routed(model, name.removeprefix("layers.")):
            return (
                f"tune.targets names {target}, and {name} belongs to the routed experts, which get "
                f"no adapters; {fix}"
            )
    return (
        f"tune.targets names {target}, which is no linear layer of the blocks of a "
        f"{config.model.family} model; {fix}"
    )


def _taken_for_experts(model: DecoderModel, targets: Sequence[str]) -> str | None:
    """Return a sentence if peft would read the run's adapters otherwise.

    In models with experts it replaces these names by the stacked weights of experts, also where a
    dense layer has them.
    """
    children = (name for name, _ in model.layers.named_modules())
    if not any(name.endswith(".experts") for name in children):
        return None
    layers = adapted_layers(model, targets)
    for name in layers:
        if name.rpartition(".")[2] in EXPERT_LAYERS:
            others = {other.rpartition(".")[2] for other in linear_layers(model)}
            fix = ",".join(sorted(others - EXPERT_LAYERS))
            return (
                f"tune.targets names {name}, and peft takes adapters of {name} for those of "
                f"routed experts; set tune.targets=[{fix}]"
            )
    return None


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
    for name, layer in linear_layers(_build(config)).items():
        if type(layer.module) is not Linear:
            return (
                f"tune.base=nf4 packs the linear layers of the families of configs/model, and "
                f"{name} is transformers' or your own; set tune.base=plain"
            )
        if layer.in_features % BLOCK:
            return (
                f"tune.base=nf4 scales blocks of {BLOCK} elements, which do not divide the "
                f"{layer.in_features} columns of {name}; set tune.base=plain"
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
    weights_format(model)  # of the adapter that the run writes
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
