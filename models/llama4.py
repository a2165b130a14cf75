"""Llama 4's text model: blocks with and without experts in turn, one routed and one shared expert
per token, iRoPE.

iRoPE: three of four blocks use rotary positions and attend within chunks of the sequence; every
fourth has no rotary positions, attends to everything, and scales its queries by the logarithm of
their position. Queries and keys of the rotary blocks are normalized after the rotation, without
weights. The router's sigmoid scales an expert's input.

Source: the published ``config.json`` and implementation
(https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E). Tested against transformers'
Llama4ForCausalLM (``tests/models/test_families.py``). Not covered: the vision model, biases,
dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .checks import MOST_LAYERS, MOST_TOKENS, above, at_least
from .huggingface import Piece, whole
from .moe import Scores
from .moe_config import MoEConfig
from .rotary import (
    ROTARY_DEFAULTS,
    ROTARY_KEYS,
    ROTARY_NAMES,
    RotaryFormat,
)
from .rotations import Pairs
from .self_attention import Attention, AttentionTemperature


@dataclass(frozen=True)
class Llama4Format(RotaryFormat):
    """Hugging Face stacks experts like ours, each transposed; ``config.json`` lists the special
    blocks."""

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Transpose the stacked parameters."""
        if ".experts." not in name:
            return super().pieces(name, shape)
        transposed = (shape[0], shape[2], shape[1])
        return [
            Piece(
                whole(shape),
                self.tensor_name(name),
                transposed,
                whole(transposed),
                transposed=True,
            )
        ]

    def write_config(self, config: Any) -> dict[str, Any]:
        """``config.json`` with the lists that follow from our settings."""
        assert isinstance(config, Llama4Config)
        # transformers refuses a null.
        chunk_len = (
            config.attention_chunk_len or config.implied()["attention_chunk_len"]
        )
        return (
            super().write_config(config)
            | _layer_lists(config)
            | {"attention_chunk_size": chunk_len}
        )

    def read_config(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our configuration.

        Raises:
            ValueError: also for a list that is not every N-th block.
        """
        fields = super().read_config(tree)
        # Scout's value is 4
        fields["attention_temperature"] = bool(fields["attention_temperature"])
        for key, expected in _layer_lists(Llama4Config(**fields)).items():
            if tree.get(key, expected) != expected:
                raise ValueError(
                    f"config.json says {key}={tree[key]}, which llama4_text models here do not "
                    f"compute (only {expected}, as its other keys say)"
                )
        return fields


@dataclass
class Llama4Config(MoEConfig):
    """A Llama 4 text model."""

    family: ClassVar[str] = "llama4"
    hugging_face: ClassVar[RotaryFormat] = Llama4Format(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        keys={
            **ROTARY_KEYS,
            "ffn_dim": "intermediate_size_mlp",
            "expert_ffn_dim": "intermediate_size",
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "moe_every": "interleave_moe_layer_step",
            "nope_every": "no_rope_layer_interval",
            "attention_chunk_len": "attention_chunk_size",
            "qk_norm": "use_qk_norm",
            "attention_temperature": "attn_temperature_tuning",
            "temperature_scale": "attn_scale",
            "temperature_floor": "floor_scale",
            "router_aux_loss_coef": "router_aux_loss_coef",
        },
        names={**ROTARY_NAMES, "mlp": "feed_forward"},
        fixed={"hidden_act": "silu", "attention_bias": False},
        default_theta=500000.0,
        defaults={
            **ROTARY_DEFAULTS,
            "head_dim": 128,
            "nope_every": 4,
            "attention_chunk_len": 8192,
            "qk_norm": True,
            "attention_temperature": True,
            "temperature_scale": 0.1,
            "temperature_floor": 8192,
            "router_aux_loss_coef": 0.001,
        },
    )

    shares_an_expert: ClassVar[bool] = True

    name: str = "llama4"
    rope_theta: float = 500000.0
    n_experts: int = 16
    top_k: int = 1
    expert_ffn_dim: int = 8192
    """Width of an expert's hidden layer, including the shared one."""
    nope_every: int = field(default=4, metadata=at_least(1, MOST_LAYERS))
    """Every N-th block has no rotary positions and attends to the full sequence."""
    attention_chunk_len: int | None = field(
        default=8192, metadata=at_least(1, MOST_TOKENS)
    )
    """Tokens of a chunk, within which the rotary blocks attend; null for the full sequence."""
    qk_norm: bool = True
    """Normalize queries and keys of the rotary blocks."""
    attention_temperature: bool = True
    """Scale queries of the other blocks by position."""
    temperature_scale: float = field(default=0.1, metadata=above(0, 1e6))
    """Growth with the logarithm of the position."""
    temperature_floor: int = field(default=8192, metadata=at_least(1, MOST_TOKENS))
    """Tokens before the first growth step, and between two."""

    def implied(self) -> dict[str, int]:
        """The width of a head, and a chunk of the full context."""
        return super().implied() | {"attention_chunk_len": self.max_seq_len}

    @property
    def scores(self) -> Scores:
        """A sigmoid, which scales an expert's input."""
        return Scores.sigmoid

    @property
    def needs_its_context(self) -> bool:
        """True if the full context is one chunk."""
        return self.attention_chunk_len is None

    def is_cosmetic(self, key: str) -> bool:
        """Also settings of a temperature, chunks or a feed-forward that no block has."""
        layers = range(self.n_layers)
        if key.startswith("temperature_"):
            return not self.attention_temperature or all(
                self.rotates(layer) for layer in layers
            )
        if key in ("attention_chunk_len", "qk_norm"):
            return not any(self.rotates(layer) for layer in layers)
        return super().is_cosmetic(key)

    def rotates(self, layer: int) -> bool:
        """Whether a block has rotary positions."""
        return (layer + 1) % self.nope_every != 0

    def attention(self, layer: int) -> Attention:
        """Construct an attention with rotary positions and chunks, or with a temperature."""
        heads = self.n_heads, self.n_kv_heads, self.head_width
        if self.rotates(layer):
            return Attention(
                self.dim,
                *heads,
                rotation=Pairs.neighbors,
                rotated_norm_eps=self.norm_eps if self.qk_norm else None,
                chunk_len=self.attention_chunk_len,
            )
        temperature = AttentionTemperature(
            self.temperature_scale, self.temperature_floor
        )
        return Attention(
            self.dim,
            *heads,
            rotation=None,
            temperature=temperature if self.attention_temperature else None,
        )


def _layer_lists(config: Llama4Config) -> dict[str, list[Any]]:
    layers = range(config.n_layers)
    return {
        # 1 where positions are rotated
        "no_rope_layers": [int(config.rotates(layer)) for layer in layers],
        "moe_layers": [layer for layer in layers if config.has_experts(layer)],
        "layer_types": [
            "chunked_attention" if config.rotates(layer) else "full_attention"
            for layer in layers
        ],
    }
