"""Plain ``torch.nn`` language models: they know shapes, never ranks, meshes or devices.

A family is a configuration and the ``DecoderModel`` that it builds. ``MODELS`` is the registry: a
new family is one file here, its presets in ``configs/model``, and one entry below
(``docs/models.md``).
"""

from collections.abc import Mapping

from fsdptoys.register import registry

from . import npu_kernels
from .cache import KeyValueCache
from .capabilities import ModelCapabilities
from .config import ModelConfig, NativeConfig
from .context import Context, FullSequences
from .decoder import DecoderModel, NativeModel, ParameterCounts, use_context
from .documents import attended_keys
from .foreign import ModuleConfig, TransformersConfig
from .gpt2 import GPT2Config
from .huggingface import HuggingFaceFormat, Piece, WeightsFormat, whole
from .llama import LlamaConfig
from .llama4 import Llama4Config
from .mistral import MistralConfig
from .moe import Router, routers
from .moe_config import MoEConfig
from .ops import Ops, choose_ops, use_ops
from .qwen2 import Qwen2Config
from .qwen3 import Qwen3Config
from .qwen3_moe import Qwen3MoEConfig
from .rotary import RotaryConfig
from .stored_buffers import StoredBuffer, stored_buffers

NATIVE_MODELS: dict[str, type[NativeConfig]] = {
    config.family: config
    for config in (
        LlamaConfig,
        Llama4Config,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoEConfig,
        GPT2Config,
    )
}
"""Name of a family of this package → configuration class."""

MODELS: Mapping[str, type[ModelConfig]] = registry(
    "model", {**NATIVE_MODELS, TransformersConfig.family: TransformersConfig}
)
"""Name of a family → configuration class, also those that own code registers."""

__all__ = [
    "MODELS",
    "NATIVE_MODELS",
    "Context",
    "DecoderModel",
    "FullSequences",
    "GPT2Config",
    "HuggingFaceFormat",
    "KeyValueCache",
    "Llama4Config",
    "LlamaConfig",
    "MistralConfig",
    "MoEConfig",
    "ModelCapabilities",
    "ModelConfig",
    "ModuleConfig",
    "NativeConfig",
    "NativeModel",
    "Ops",
    "ParameterCounts",
    "Piece",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoEConfig",
    "RotaryConfig",
    "Router",
    "StoredBuffer",
    "TransformersConfig",
    "WeightsFormat",
    "attended_keys",
    "choose_ops",
    "npu_kernels",
    "routers",
    "stored_buffers",
    "use_context",
    "use_ops",
    "whole",
]
