"""Adapters on a run's model (``tune=lora``): made, initialized, and told which samples a micro-batch holds."""

import torch
from torch import Tensor

from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import Samples, add_adapters, init_adapter_rows, is_adapter
from fsdptoys.models.nf4 import is_packed, pack, quantize_linears, unpacked_columns, unquantized_name
from fsdptoys.parallel import Fill, seeded
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.dtensor import local_tensor, sharded_rows


def tune_model(model: DecoderModel, config: Config) -> Samples | None:
    """Freeze a model on the meta device and add adapters, where the configuration says so.

    Returns:
        What the layers ask for the samples of a micro-batch; None where nothing is dropped.

    Raises:
        ConfigError: if the family has none of the layers.
    """
    tune = config.tune
    if not isinstance(tune, LoRAConfig):
        return None
    samples = Samples(config.train.seed)
    try:
        add_adapters(model, tune.targets, tune.rank, tune.alpha, tune.dropout, samples)
    except ValueError as error:
        raise ConfigError(f"tune.targets: {error}; set tune.targets=[q_proj,v_proj]") from error
    if config.parallel.mixes_dtypes and config.train.grain_tokens is None:
        # The forward computes from these values in any case; a frozen weight needs no float32 copy to add updates to.
        for param in model.parameters():
            if not param.requires_grad:
                param.data = param.data.to(config.parallel.param_dtype.torch)  # keeps shared weights shared
    return samples if tune.dropout else None


def quantize_base(model: DecoderModel, config: Config) -> None:
    """Quantize the frozen weights of a model on the meta device, where the configuration says so."""
    if isinstance(config.tune, LoRAConfig) and config.tune.base is Base.nf4:
        quantize_linears(model)


def fill_packed(fill: Fill) -> Fill:
    """Fill quantized weights from the values that ``fill`` gives to plain ones, one at a time."""

    def fill_or_pack(param: Tensor, name: str) -> None:
        if not is_packed(name):
            fill(param, name)
            return
        packed = local_tensor(param)
        columns = unpacked_columns(packed)
        rows = torch.empty(*packed.shape[:-1], columns, device=packed.device)
        fill(sharded_rows(param, rows), unquantized_name(name))
        pack(rows, packed)

    return fill_or_pack


def fill_adapters(fill: Fill, source: AdapterFolder | None, seed: int, threads: int) -> Fill:
    """Fill adapters from a folder or, without one, from the run's seed, and everything else with ``fill``."""
    adapters = source.fill if source else seeded(init_adapter_rows, seed, threads)
    return lambda param, name: (adapters if is_adapter(name) else fill)(param, name)
