"""Plain ``torch.nn`` language models: they know shapes, never ranks, meshes or devices.

Every model is built from a config dataclass and is a ``DecoderModel``. A new family adds its config and class to
``MODEL_CLASSES``, and its presets to ``configs/model``.
"""

from .decoder import DecoderModel
from .llama import LlamaConfig, LlamaModel

ModelConfig = LlamaConfig

MODEL_CLASSES: dict[type, type[DecoderModel]] = {LlamaConfig: LlamaModel}
"""Config dataclass → model class: the registry that a new family enters."""


def build_model(config: ModelConfig) -> DecoderModel:
    """Construct the model that ``config`` describes, on the current default device (use ``torch.device("meta")``)."""
    return MODEL_CLASSES[type(config)](config)


__all__ = ["MODEL_CLASSES", "DecoderModel", "LlamaConfig", "LlamaModel", "ModelConfig", "build_model"]
