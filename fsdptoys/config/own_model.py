"""Check a model of own code before any rank starts."""

import torch

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.foreign.module import ModuleModel
from fsdptoys.models.ops import Layer
from fsdptoys.register import registered


def check_own_model(config: ModelConfig) -> None:
    """Check that a registered family builds a ``DecoderModel`` of ``Layer``s, which declare initial
    values, or any module by a ``ModuleConfig``. Other families pass.

    Raises:
        ConfigError: naming the class to change.
    """
    if config.family not in registered("model"):
        return
    with torch.device("meta"):
        model = config.build()
    if not isinstance(model, DecoderModel):
        raise ConfigError(
            f"model={config.family} builds a {type(model).__name__}, and strategies need the "
            "parts of a DecoderModel; derive its configuration from ModuleConfig of "
            "fsdptoys.models, which takes any nn.Module, or it from DecoderModel"
        )
    if isinstance(model, ModuleModel):  # checked by its configuration
        return
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if not isinstance(module, Layer):
                raise ConfigError(
                    f"{prefix}.{name} of model={config.family} belongs to a "
                    f"{type(module).__name__}, which declares no initial values; use the layers "
                    "of fsdptoys.models.layers, or derive its class from Layer of "
                    "fsdptoys.models.ops"
                )
