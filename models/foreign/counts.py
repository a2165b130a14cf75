"""Numbers of parameters, and FLOPs of a token, of a model of transformers.

FLOPs of forward and backward per token:

- 6 for each element of a weight of two dims or more, except lookup tables; 4 if it is frozen;
- of a stack of experts (three dims), the share of a token: experts per token over experts;
- of attention in each block 12 · heads · (width of a query + width of a value) / 2 for each of the
  keys that a token sees on average: half of the sequence, or of the window.

Blocks without softmax attention are counted with it where ``layer_types`` does not say so.
"""

import math
from typing import Any

from torch import nn

from ..decoder import ParameterCounts
from ..layers import matmul_flops
from .architecture import transformers_config
from .base import TransformersBase

WITHOUT_SOFTMAX = ("linear", "mamba", "conv", "recurrent", "lightning")
"""Parts of names in ``layer_types``."""


def count_parameters(model: TransformersBase) -> ParameterCounts:
    """Count parameters by purpose."""
    share = expert_share(_settings(model))
    total = sum(param.numel() for param in model.parameters())
    tables = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    experts = sum(param.numel() for param in model.parameters() if param.ndim == 3)
    if share == 1:
        experts = 0
    return ParameterCounts(
        total=total,
        embedding=sum(param.numel() for param in tables),
        experts=experts,
        active=total - experts + round(experts * share),
    )


def matmul_flops_per_token(
    model: TransformersBase, seq_len: int, most_keys: float = math.inf
) -> float:
    """FLOPs of forward and backward per token.

    Args:
        model: with all parameters.
        seq_len: tokens of a sequence.
        most_keys: bound of the keys that a token sees on average.
    """
    settings = _settings(model)
    share = expert_share(settings)
    flops = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for param in module.parameters(recurse=False):
            if param.ndim >= 2:
                part = share if param.ndim == 3 else 1.0
                flops += part * matmul_flops(param.numel(), param.requires_grad)
    return flops + sum(
        attention_flops(settings, min(keys, most_keys))
        for keys in mean_keys(settings, seq_len)
    )


def expert_share(settings: Any) -> float:
    """The share of routed experts that compute one token; 1 without experts."""
    per_token = _number(
        settings, "num_experts_per_tok", "num_experts_per_token", "top_k"
    )
    for key in (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
    ):
        experts = _number(settings, key)
        if experts:
            return min(1.0, (per_token or _number(settings, "moe_k") or 1) / experts)
    return 1.0


def attention_flops(settings: Any, keys: float) -> float:
    """FLOPs of the scores and of the weighted sum of one block, per token."""
    heads = _number(settings, "num_attention_heads") or 0
    width = _number(settings, "head_dim") or settings.hidden_size // max(1, heads)
    nope = _number(settings, "qk_nope_head_dim")
    query = nope + (_number(settings, "qk_rope_head_dim") or 0) if nope else width
    value = _number(settings, "v_head_dim") or width
    return 6.0 * heads * (query + value) * keys


def mean_keys(settings: Any, seq_len: int) -> list[float]:
    """The number of keys that a token sees on average, of each block with softmax attention."""
    kinds = getattr(settings, "layer_types", None)
    if not isinstance(kinds, (list, tuple)):
        kinds = ["full_attention"] * settings.num_hidden_layers
    window = _number(settings, "sliding_window") or _number(
        settings, "attention_chunk_size"
    )
    means = []
    for kind in kinds:
        if any(part in str(kind) for part in WITHOUT_SOFTMAX):
            continue
        local = window and ("sliding" in str(kind) or "chunk" in str(kind))
        size = min(seq_len, window) if local and window else seq_len
        # the first ``size`` tokens see half of them on average, later ones all
        means.append((size * size / 2 + (seq_len - size) * size) / seq_len)
    return means


def _number(settings: Any, *keys: str) -> int | None:
    for key in keys:
        value = getattr(settings, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _settings(model: TransformersBase) -> Any:
    return transformers_config(model.config.text, model.config.layers)
