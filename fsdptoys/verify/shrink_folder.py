"""A small form of a model of transformers: another ``config.json``, and no weights.

Keys are changed by their names, which families share. What a family does not accept is undone: its
widths stay, then its vocabulary, and at last its layers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdptoys.checkpoint.safetensors_io import read_json
from fsdptoys.errors import ConfigError
from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign.architecture import LAYER_KEYS, transformers_config
from fsdptoys.models.foreign.build import build_causal_lm
from fsdptoys.models.foreign.json_text import config_text
from fsdptoys.utils.text import one_line, value_text

from .shrink import (
    CHOSEN_EXPERTS,
    CHUNK,
    EXPERTS,
    GROUP,
    HEAD_WIDTH,
    HEADS,
    LARGEST_VOCABULARY,
    LAYERS,
    SMALL_WIDTH,
    VOCABULARY,
    rounded,
)

WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
KEY_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads")
HEAD_WIDTH_KEYS = ("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim")
HIDDEN_KEYS = (
    *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"),
    *("shared_intermediate_size", "expert_ffn_hidden_size", "dense_intermediate_size"),
)
RANKS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "rotary_dim": 8}
"""Key → its largest value, of latent and partial rotary attention."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "experts_top_k")
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LIMIT_KEYS = ("sliding_window", "attention_chunk_size", "window_size")
PERIOD_KEYS = (
    *("decoder_sparse_step", "interleave_moe_layer_step", "no_rope_layer_interval"),
    *("full_attention_interval", "attn_layer_period", "expert_layer_period"),
    *("sliding_window_pattern", "moe_layer_interval"),
)
"""Keys: every N-th block is of another kind."""
KIND_LISTS = ("layer_types", "block_types", "mlp_layer_types")
"""Keys: the kind of each block."""
CONFIG_FILE = "config.json"
MOST_ELEMENTS = 10**7
"""Parameters of a small form, which are trained dozens of times on a CPU."""


def write_small_folder(source: Path, target: Path) -> list[str]:
    """Write a small ``config.json``; return sentences on it.

    Args:
        source: folder with the model's ``config.json``.
        target: empty folder.

    Raises:
        ConfigError: if transformers does not accept the configuration.
    """
    tree = read_json(source / CONFIG_FILE)
    try:
        text = config_text(tree, str(source / CONFIG_FILE))
        settings = transformers_config(text, None).to_dict()
    except ValueError as mistake:
        raise ConfigError(str(mistake)) from mistake
    # Ranks are forked later, for which there must be no threads of a computation
    torch.set_num_threads(1)
    widths = _widths(settings)
    vocabulary = _vocabulary(settings)
    layers = _layers(settings)
    attempts = [
        widths | vocabulary | layers,
        vocabulary | layers,
        layers,
        {},
    ]
    problem = ""
    for changes in attempts:
        small = {**tree, **changes}
        fault = _fault(small)
        if fault is None:
            (target / CONFIG_FILE).write_text(json.dumps(small), encoding="utf-8")
            sentences = [_sentence(tree, changes)] if changes else []
            return sentences + [problem] * bool(problem)
        problem = problem or f"a narrower form fails ({fault})"
    raise ConfigError(
        f"{source / CONFIG_FILE} has no small form: {problem}; write a small config.json and name "
        "its folder with --full"
    )


def _sentence(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    parts = [
        f"{key}={value_text(value)}"
        for key, value in changes.items()
        if tree.get(key) != value and not isinstance(value, list)
    ]
    return f"small form: {' '.join(parts)}"


def _fault(tree: dict[str, Any]) -> str | None:
    """Why a configuration cannot be computed; None if it can."""
    try:
        config = TransformersConfig(config=config_text(tree, CONFIG_FILE))
        config.check()
        with torch.device("meta"):
            params = build_causal_lm(config).parameters()
        elements = sum(param.numel() for param in params)
        if elements > MOST_ELEMENTS:
            return f"it has {elements:,} parameters"
        model = build_causal_lm(config)
        tokens_BT = torch.arange(8).remainder(config.vocab_size).unsqueeze(0)
        with torch.no_grad():
            logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    except Exception as mistake:  # of any kind, as classes are foreign
        return one_line(f"{type(mistake).__name__}: {mistake}")
    return None if logits_BTV.isfinite().all() else "its logits are not finite"


def _layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As many blocks as all kinds need, and lists cut to them."""
    keys = [key for key in LAYER_KEYS if isinstance(settings.get(key), int)]
    if not keys:
        return {}
    before = settings[keys[0]]
    kinds = [settings[key] for key in KIND_LISTS if settings.get(key)]
    needed = [LAYERS, *(_prefix_with_all(of_layers) for of_layers in kinds)]
    needed += [
        settings[key] for key in PERIOD_KEYS if isinstance(settings.get(key), int)
    ]
    count = min(before, max(needed))
    cut = {
        key: value[:count]
        for key, value in settings.items()
        if isinstance(value, list) and len(value) == before
    }
    return cut | dict.fromkeys(keys, count)


def _prefix_with_all(kinds: Sequence[object]) -> int:
    """Length of the shortest beginning of a list that has all of its values."""
    return 1 + max(kinds.index(kind) for kind in kinds)


def _vocabulary(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("vocab_size", 0) <= LARGEST_VOCABULARY:
        return {}
    ids = {
        key: VOCABULARY - 1
        for key, value in settings.items()
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY
    }
    return ids | {"vocab_size": VOCABULARY}


def _widths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, experts, and all that is as wide as they are together."""
    new = _limits(settings)
    width_keys = _integers(settings, WIDTH_KEYS)
    head_keys = _integers(settings, HEAD_KEYS)
    if not width_keys or not head_keys:
        return new
    width = settings[width_keys[0]]
    heads = settings[head_keys[0]]
    key_head_keys = _integers(settings, KEY_HEAD_KEYS)
    key_heads = settings[key_head_keys[0]] if key_head_keys else heads
    if width <= SMALL_WIDTH or heads % key_heads:
        return new
    group = min(heads // key_heads, GROUP)
    new_key_heads = min(key_heads, HEADS // group)
    new_heads = new_key_heads * group
    head_width = settings.get("head_dim") or width // heads
    new_head_width = min(head_width, HEAD_WIDTH)
    new_width = rounded(new_heads * new_head_width * width / (heads * head_width))
    new |= dict.fromkeys(width_keys, new_width)
    new |= dict.fromkeys(head_keys, new_heads)
    new |= dict.fromkeys(key_head_keys, new_key_heads)
    new |= dict.fromkeys(_integers(settings, HEAD_WIDTH_KEYS), new_head_width)
    if "qk_rope_head_dim" in new and "head_dim" in new:
        new["head_dim"] = new["qk_rope_head_dim"]  # of latent attention
    for key in _integers(settings, HIDDEN_KEYS):
        new[key] = rounded(settings[key] * new_width / width)
    return new


def _limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    limits = (
        RANKS
        | GROUPS
        | dict.fromkeys(EXPERT_KEYS, EXPERTS)
        | dict.fromkeys(CHOSEN_KEYS, CHOSEN_EXPERTS)
        | dict.fromkeys(LIMIT_KEYS, CHUNK)
    )
    return {
        key: min(settings[key], limit)
        for key, limit in limits.items()
        if key in _integers(settings, [key])
    }


def _integers(settings: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Keys with whole numbers."""
    return [key for key in keys if type(settings.get(key)) is int]
