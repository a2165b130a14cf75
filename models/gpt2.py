"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere and a head tied to the embedding.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Tested against
transformers' GPT2LMHeadModel (``tests/models/test_families.py``). Not covered: dropout.

Shapes: D width, T sequence.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .checks import MOST_HIDDEN, at_least
from .config import NativeConfig
from .decoder import NativeModel
from .huggingface import HuggingFaceFormat, Piece, whole
from .layers import Block, GELUFeedForward, LayerNorm, PositionEmbedding
from .self_attention import Attention


@dataclass(frozen=True)
class GPT2Format(HuggingFaceFormat):
    """Hugging Face stores projections as (in, out), and queries, keys and values in one tensor."""

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Transpose projections, and split the one of queries, keys and values."""
        parts = name.split(".")
        projection, kind = parts[-2:]
        if projection in ("q_proj", "k_proj", "v_proj"):
            offset = ("q_proj", "k_proj", "v_proj").index(projection) * shape[0]
            tensor = self.tensor_name(".".join([*parts[:-2], "c_attn", kind]))
            columns = (offset, offset + shape[0])
            if kind == "bias":
                return [Piece(whole(shape), tensor, (3 * shape[0],), (columns,))]
            whole_shape = (shape[1], 3 * shape[0])
            return [
                Piece(
                    whole(shape),
                    tensor,
                    whole_shape,
                    ((0, shape[1]), columns),
                    transposed=True,
                )
            ]
        tensor = self.tensor_name(name).replace("mlp.down_proj", "mlp.c_proj")
        transposed = projection.endswith("_proj") and kind == "weight"
        stored = shape[::-1] if transposed else shape
        return [Piece(whole(shape), tensor, stored, whole(stored), transposed)]


@dataclass
class GPT2Config(NativeConfig):
    """A GPT-2 model."""

    family: ClassVar[str] = "gpt2"
    hugging_face: ClassVar[HuggingFaceFormat] = GPT2Format(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        keys={
            "dim": "n_embd",
            "n_layers": "n_layer",
            "n_heads": "n_head",
            "ffn_dim": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        names={
            "": "transformer.",
            "embed_tokens": "wte",
            "embed_positions": "wpe",
            "layers": "h",
            "norm": "ln_f",
            "attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            "o_proj": "c_proj",
            "up_proj": "c_fc",
        },
        fixed={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        write_only={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        defaults={
            "ffn_dim": None,
            "tie_embeddings": True,
            "init_std": 0.02,
            "norm_eps": 1e-5,
        },
        aliases={"n_positions": "n_ctx"},
        drops=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    )

    name: str = "gpt2"
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    ffn_dim: int | None = field(default=None, metadata=at_least(1, MOST_HIDDEN))
    """Width of the feed-forward's hidden layer; null for four times ``dim``."""
    vocab_size: int = 50257
    max_seq_len: int = 1024
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.n_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} must divide model.dim={self.dim}; "
                f"set model.dim to a multiple of {self.n_heads}"
            )

    def implied(self) -> dict[str, int]:
        """The width of the feed-forward."""
        return {"ffn_dim": 4 * self.dim}

    def build(self) -> "GPT2Model":
        """Construct the model."""
        return GPT2Model(self)


class GPT2Model(NativeModel):
    """GPT-2 for causal language modeling."""

    forward_order = ("embed_tokens", "embed_positions", "layers", "norm", "lm_head")

    def __init__(self, config: GPT2Config) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(config.dim, config.norm_eps)

        def attention() -> Attention:
            head_dim = config.dim // config.n_heads
            return Attention(
                config.dim,
                config.n_heads,
                config.n_heads,
                head_dim,
                bias=True,
                rotation=None,
            )

        ffn_dim = config.ffn_dim or config.implied()["ffn_dim"]
        blocks = [
            Block(norm(), attention(), norm(), GELUFeedForward(config.dim, ffn_dim))
            for _ in range(config.n_layers)
        ]
        super().__init__(config, blocks, norm())
        self.embed_positions = PositionEmbedding(config.max_seq_len, config.dim)

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Sum of token and position embeddings."""
        tokens_BTD: Tensor = self.embed_tokens(tokens_BT)
        return tokens_BTD + self.embed_positions(
            self.ops.positions(positions, tokens_BT)
        )
