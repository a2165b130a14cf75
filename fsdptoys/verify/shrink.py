"""A small model with the same kinds of layers: fewer layers, narrower, fewer experts and tokens.

Widths keep their proportions, and heads their groups. As many layers stay as one period of kinds
has, at least two. A limit on positions, such as a chunk of attention, becomes shorter than a
sequence, so that it still cuts.
"""

import dataclasses
import math
from typing import Any

from fsdptoys.models import ModelConfig

LAYERS = 2
HEADS = 4
GROUP = 2
"""Query heads for a key head, at most."""
HEAD_WIDTH = 16
SMALL_WIDTH = 128
"""Models up to this width keep it."""
EXPERTS = 8
CHOSEN_EXPERTS = 2
LARGEST_VOCABULARY = 512
VOCABULARY = 256
SMALL_POSITIONS = 512
POSITIONS = 128
CHUNK = 24
FLOOR = 16

PERIODS = ("moe_every", "nope_every")
"""Fields: every N-th block is of another kind."""
HIDDEN = ("ffn_dim", "expert_ffn_dim")
"""Fields that scale with the width."""
LIMITS = {
    "n_experts": EXPERTS,
    "top_k": CHOSEN_EXPERTS,
    "attention_chunk_len": CHUNK,
    "temperature_floor": FLOOR,
}
"""Field → its largest value."""


def shrink_model(model: ModelConfig, positions: int = POSITIONS) -> dict[str, Any]:
    """Return the fields of a model to change, and their new values.

    Args:
        model: of any family; fields that it does not have are left out.
        positions: longest sequence that must fit.
    """
    old = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model)
    }
    new = _layers(old) | _widths(model, old)
    if old.get("vocab_size", 0) > LARGEST_VOCABULARY:
        new["vocab_size"] = VOCABULARY
    if old.get("max_seq_len", 0) > SMALL_POSITIONS:
        new["max_seq_len"] = min(old["max_seq_len"], max(POSITIONS, positions))
    for name, limit in LIMITS.items():
        if old.get(name) is not None:
            new[name] = min(old[name], limit)
    return {name: value for name, value in new.items() if value != old[name]}


def _layers(old: dict[str, Any]) -> dict[str, Any]:
    if "n_layers" not in old:
        return {}
    period = math.lcm(*(old.get(name) or 1 for name in PERIODS))
    return {"n_layers": min(old["n_layers"], max(LAYERS, period))}


def _widths(model: ModelConfig, old: dict[str, Any]) -> dict[str, Any]:
    """Heads, and all that is as wide as they are together."""
    dim = old.get("dim", 0)
    heads = old.get("n_heads", 0)
    key_heads = old.get("n_kv_heads") or heads
    if dim <= SMALL_WIDTH or not heads or heads % key_heads:
        return {}
    group = min(heads // key_heads, GROUP)
    new_key_heads = min(key_heads, HEADS // group)
    new_heads = new_key_heads * group
    head_width = min(model.head_width, HEAD_WIDTH)
    share = dim / (heads * model.head_width)
    new_dim = rounded(new_heads * head_width * share)
    new = {"dim": new_dim, "n_heads": new_heads}
    if "n_kv_heads" in old:
        new["n_kv_heads"] = new_key_heads
    if old.get("head_dim") is not None:
        new["head_dim"] = head_width
    for name in HIDDEN:
        if old.get(name) is not None:
            new[name] = rounded(old[name] * new_dim / dim)
    return new


def rounded(width: float) -> int:
    """The nearest multiple of 16, at least one."""
    return max(16, round(width / 16) * 16)
