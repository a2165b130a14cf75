"""Check adapters against model, strategy and layers before the launch."""

from typing import Any, Protocol

import torch
from torch import nn

from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.errors import ConfigError
from fsdptoys.memory import MemoryConfig
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.linear import Linear
from fsdptoys.models.nf4 import BLOCK
from fsdptoys.parallel import STRATEGIES, ParallelConfig
from fsdptoys.parallel.float8 import Float8
from fsdptoys.tune import Base, LoRAConfig, TuneConfig
from fsdptoys.utils.text import short_text


class Sections(Protocol):
    """Sections of a configuration that affect these checks; ``schema.Config`` has them."""

    tune: TuneConfig
    train: Any
    parallel: ParallelConfig
    memory: MemoryConfig
    model: ModelConfig


def check_tune(config: Sections) -> None:
    """Refuse adapters that the model has no layers for, and settings that cannot keep frozen weights apart.

    Raises:
        ConfigError: naming key, value and fix.
    """
    tune, model, parallel, float8 = config.tune, config.model, config.parallel, config.train.float8
    if not isinstance(tune, LoRAConfig):
        return
    with torch.device("meta"):
        layers = model.build().layers
    had = {name.rpartition(".")[2] for name, module in layers.named_modules() if type(module) is Linear}
    missing = [target for target in tune.targets if target not in had]
    if missing and tune.targets != LoRAConfig().targets:
        kept = [target for target in tune.targets if target in had] or sorted(had)
        raise ConfigError(
            f"tune.targets names {missing[0]}, which is no linear layer of the blocks of a {model.family} model; set "
            f"tune.targets=[{','.join(kept)}]"
        )
    if not parallel.keeps_parameters:
        raise ConfigError(
            f"tune=lora trains some parameters of a unit, which parallel={parallel.name} makes one flat one with "
            "parallel.use_orig_params=false; set parallel.use_orig_params=true"
        )
    if float8 is not Float8.none:
        raise ConfigError(
            f"train.float8={float8.value} converts linear layers, to which tune=lora adds; set train.float8=none"
        )
    if tune.base is Base.nf4:
        _check_nf4(config, layers)


def _check_nf4(config: Sections, layers: nn.Module) -> None:
    key, parallel = "tune.base=nf4", config.parallel
    if config.train.deterministic.covers_layouts:
        raise ConfigError(
            f"{key} packs weights that train.deterministic=layout computes with in float64; set tune.base=plain or "
            "train.deterministic=true"
        )
    if not parallel.mixes_dtypes:
        fix = next(name for name in ("fsdp2", "ddp") if STRATEGIES[name].mixes_dtypes)
        raise ConfigError(
            f"{key} packs weights into bytes, which parallel={parallel.name} would cast like other weights with torch "
            f"{torch.__version__}; set parallel={fix} or tune.base=plain"
        )
    if config.memory.cpu_offload:
        raise ConfigError(
            f"{key} packs weights on the device, and memory.cpu_offload=true keeps them in host memory; set "
            "memory.cpu_offload=false or tune.base=plain"
        )
    for name, module in layers.named_modules():
        if type(module) is Linear and module.in_features % BLOCK:
            raise ConfigError(
                f"{key} scales blocks of {BLOCK} elements, which do not divide the {module.in_features} columns of "
                f"layers.{name}; set tune.base=plain"
            )


def open_adapter(tune: TuneConfig, model: DecoderModel) -> AdapterFolder | None:
    """Open the folder of ``tune.adapter``, if any, and check that it fits the run.

    Args:
        tune: the run's.
        model: on the meta device, without adapters.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if not isinstance(tune, LoRAConfig) or tune.adapter is None:
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
            f"{key}={tune.adapter} was trained on {short_text(folder.base)}, and model.init_from=null draws other "
            "weights; set model.init_from to a folder with that model"
        )
    return folder
