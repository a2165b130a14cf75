"""Adapters on a run's model, and the form of its frozen weights (``tune=lora``)."""

from collections.abc import Sequence

from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import Samples, add_adapters
from fsdptoys.models.nf4 import quantize_linears
from fsdptoys.tune import Base, LoRAConfig


def tune_model(model: DecoderModel, config: Config) -> Samples | None:
    """Freeze a model on the meta device and add adapters, if the configuration says so.

    Returns:
        The samples of a micro-batch, for layers with dropout; None without dropout.

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
        raise ConfigError(
            f"tune.targets: {error}; set tune.targets=[q_proj,v_proj]"
        ) from error
    if config.parallel.capabilities.mixed_dtypes and config.train.grain_tokens is None:
        # The forward computes from these values in any case; a frozen weight needs no float32 copy
        # to add updates to.
        for name, param in model.named_parameters():
            if not param.requires_grad and not _stays_float32(model, name):
                # Keeps shared weights shared
                param.data = param.data.to(config.parallel.param_dtype.torch)
    return samples if tune.dropout else None


def _stays_float32(model: DecoderModel, name: str) -> bool:
    """Whether a parameter belongs to a module that computes in float32 in every dtype."""
    return any(name.startswith(f"{module}.") for module in model.float32_modules)


def show_samples(
    samples: Samples | None, numbers: Sequence[Tensor], microbatch: int
) -> None:
    """Set the samples of a micro-batch, if layers ask for them."""
    if samples:
        samples.numbers_B = numbers[microbatch]


def quantize_base(model: DecoderModel, config: Config) -> None:
    """Quantize the frozen weights of a model on the meta device, if the configuration says so."""
    if isinstance(config.tune, LoRAConfig) and config.tune.base is Base.nf4:
        quantize_linears(model)
