"""Plain ``torch.nn`` language models: they know shapes, never ranks, meshes or devices.

A family is a configuration and the ``DecoderModel`` that it builds. ``MODELS`` is the registry: a
new family is one file here, its presets in ``configs/model``, and one entry below
(``docs/models.md``).
"""

from collections.abc import Mapping

from fsdptoys.register import registry

from . import npu_kernels
from .cache import KeyValueCache
from .config import ModelConfig
from .context import Context, FullSequences
from .decoder import DecoderModel, ParameterCounts, use_context
from .documents import attended_keys
from .gpt2 import GPT2Config
from .huggingface import HuggingFaceFormat, Piece, whole
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

MODELS: Mapping[str, type[ModelConfig]] = registry(
    "model",
    {
        config.family: config
        for config in (
            LlamaConfig,
            Llama4Config,
            Qwen3Config,
            Qwen3MoEConfig,
            GPT2Config,
        )
    },
)
"""Name of a family → configuration class, also those that own code registers."""

__all__ = [
    "MODELS",
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
    "ModelConfig",
    "Ops",
    "ParameterCounts",
    "Piece",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoEConfig",
    "RotaryConfig",
    "Router",
    "attended_keys",
    "choose_ops",
    "npu_kernels",
    "routers",
    "use_context",
    "use_ops",
    "whole",
]
