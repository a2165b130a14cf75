"""What every model has: the shape that configs share, and a decoder whose parts have the names that strategies wrap.

A family is a config class and a model class (see ``docs/models.md``). All of them are stacks of pre-normalised blocks
between an embedding and a head, so this page holds the walk through them; a family says how its blocks are made.

Shapes: B batch, T sequence, D width, V vocabulary, N = B·T tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .cache import KeyValueCache
from .checks import (
    MOST_CHANNELS,
    MOST_LAYERS,
    MOST_TOKENS,
    check_at_least_one,
    check_at_most,
    check_positive,
)
from .documents import document_positions, mask_documents
from .huggingface import HuggingFaceFormat
from .kernels import UsesKernels
from .layers import Attention, Block, LMHead, LossFn, RMSNorm
from .moe import MoE, Router


@dataclass
class ModelConfig(ABC):
    """Shape and initialisation of a model; its family adds the rest."""

    family: ClassVar[str]
    """Name of the family: its YAML files start from ``base_<family>``."""
    hugging_face: ClassVar[HuggingFaceFormat]
    """How the family's models are written in Hugging Face format."""

    name: str = ""
    """Name of the preset, for titles."""
    dim: int = 4096
    """Width of the residual stream."""
    n_layers: int = 32
    """Number of blocks."""
    n_heads: int = 32
    """Query heads."""
    vocab_size: int = 32000
    """Number of token ids."""
    max_seq_len: int = 4096
    """Longest sequence the positions are meant for, in tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square, or the variance, in normalisations."""
    tie_embeddings: bool = False
    """Share one weight between the token embedding and the head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it over sqrt(2·n_layers)."""
    init_from: str | None = None
    """Folder in Hugging Face format to take the initial weights from; null draws them from train.init_seed."""

    def __post_init__(self) -> None:
        """Check what holds for every model.

        Raises:
            ValueError: naming the key, its value and the fix.
        """
        check_at_most(self, dim=MOST_CHANNELS, n_layers=MOST_LAYERS, n_heads=MOST_CHANNELS, vocab_size=2**30)
        check_at_most(self, max_seq_len=MOST_TOKENS, norm_eps=1e6, init_std=1e6)
        check_at_least_one(self, "dim", "n_layers", "n_heads", "vocab_size", "max_seq_len")
        check_positive(("init_std", self.init_std, 0.02), ("norm_eps", self.norm_eps, 1e-5))
        if self.init_from is not None and not self.init_from.strip():
            raise ValueError(
                f"model.init_from={self.init_from!r} must name a folder; set model.init_from=null to draw values"
            )

    def implied(self) -> dict[str, int]:
        """What fields that may be null stand for, since it follows from others."""
        return {}

    @property
    def needs_its_context(self) -> bool:
        """Whether the weights mean something else in a model with another ``max_seq_len``."""
        return True

    def is_cosmetic(self, key: str) -> bool:
        """Whether a field makes no difference to what the weights mean, be it as other settings are."""
        return key in ("name", "init_std", "init_from", "router_aux_loss_coef", "router_z_loss_coef")

    @abstractmethod
    def build(self) -> "DecoderModel":
        """Construct the model on the current default device (use ``torch.device("meta")``)."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a weight that is shared counts once."""

    total: int
    embedding: int
    """Look-ups of tokens and positions, a shared head included."""
    experts: int
    """In experts that tokens are routed to."""
    active: int
    """That one token meets: all but the experts it is not routed to."""

    @property
    def dense(self) -> int:
        """Outside embeddings and routed experts."""
        return self.total - self.embedding - self.experts


class DecoderModel(UsesKernels, ABC):
    """A causal language model; built on the meta device, it costs no memory until a strategy materialises it."""

    embed_tokens: nn.Module
    """Token ids_BT → hidden_BTD."""
    layers: nn.ModuleList
    """Blocks, each with the parts ``attn`` and ``mlp``."""
    norm: nn.Module
    """Normalisation before the head."""
    lm_head: nn.Module
    """``lm_head(hidden_BTD, labels_BT, loss_fn)``: logits, or the loss computed inside the head's own forward."""
    chunk_lens: list[int | None]
    """Of the attentions of the blocks, each once."""
    document_end: int | None = None
    """The id that ends every document, where each is to see nothing but itself (``documents``); None where it sees
    all that is before it."""

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        attentions = (block.attn for block in blocks)
        self.chunk_lens = list(dict.fromkeys(attn.chunk_len for attn in attentions if isinstance(attn, Attention)))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.lm_head = LMHead(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, tokens_BT: Tensor, start: int = 0, positions_BT: Tensor | None = None) -> Tensor:
        """Token ids to hidden_BTD, before the first block; their positions count from ``start``, unless given."""
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT)
        return hidden_BTD

    def rotations(self, seq_len: int, start: int = 0) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, from position ``start`` on, that every block's attention is given; None for none."""
        return None

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens_BT: token ids, int64.
            labels_BT: the id that should follow each position, or ``-100`` for positions that do not count.
            loss_fn: called by the head as ``loss_fn(hidden_ND, weight_VD, labels_N)``.
            cache: of the tokens that came before these, which are added to it; without gradients only, and all
                taken for one document.

        Returns:
            logits_BTV in the parameters' dtype, or ``loss_fn``'s scalar where labels are given.
        """
        start, seq_len = 0 if cache is None else cache.length, tokens_BT.shape[1]
        rotations = self.rotations(seq_len, start)
        positions_BT, documents = None, None
        if self.document_end is not None and cache is None:
            positions_BT = document_positions(tokens_BT, self.document_end)
        hidden_BTD = self.embed(tokens_BT, start, positions_BT)
        if positions_BT is not None:
            documents = mask_documents(positions_BT, self.chunk_lens, self.kernels, hidden_BTD.dtype)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, rotations, cache, documents)
        if cache is not None:
            cache.length += seq_len
        output: Tensor = self.lm_head(self.norm(hidden_BTD), labels_BT, loss_fn)
        return output

    def init_rows(self, name: str, rows: Tensor, generator: torch.Generator) -> None:
        """Fill ``rows``, consecutive rows of the named parameter seen as a matrix, with initial values in place.

        Ones for norms, zeros for biases, normal values for the rest, smaller for projections into the residual stream.
        """
        if name.endswith("norm.weight"):
            rows.fill_(1.0)
        elif name.endswith(".bias"):
            rows.zero_()
        elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            rows.normal_(0.0, self.config.init_std / math.sqrt(2 * self.config.n_layers), generator=generator)
        else:
            rows.normal_(0.0, self.config.init_std, generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Make the non-persistent buffers on ``device``, which a meta-device construction leaves empty."""

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward a token: 6 for each weight of a matrix product, attention over half the square.

        Of routed experts those of one token count. Look-ups count nothing; recomputation under gradient checkpointing
        is not counted either, so a utilisation made from this is model FLOPs utilisation (arXiv:2204.02311, appendix B,
        with the causal half: on average a token attends to half of the positions it could see).
        """
        weights = sum(module.weight.numel() for module in self.modules() if isinstance(module, (nn.Linear, Router)))
        routed = sum(module.active_expert_parameters for module in self.modules() if isinstance(module, MoE))
        attention = sum(module.flops_per_token(seq_len) for module in self.modules() if isinstance(module, Attention))
        return 6 * (weights + routed) + attention

    def flops_per_token_of_documents(self, seq_len: int, mean_keys: Mapping[int | None, float]) -> float:
        """The same where documents are kept apart.

        Args:
            seq_len: tokens of a sequence.
            mean_keys: length of an attention's chunks → keys that a token sees there on average.
        """
        flops = self.flops_per_token(seq_len)
        for module in self.modules():
            if isinstance(module, Attention):
                flops += module.flops_per_key * mean_keys[module.chunk_len] - module.flops_per_token(seq_len)
        return flops

    def parameter_counts(self) -> ParameterCounts:
        """Count parameters by what they are for."""
        moes = [module for module in self.modules() if isinstance(module, MoE)]
        embeddings = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        total = sum(param.numel() for param in self.parameters())
        experts = sum(moe.expert_parameters for moe in moes)
        return ParameterCounts(
            total=total,
            embedding=sum(module.weight.numel() for module in embeddings),
            experts=experts,
            active=total - experts + sum(moe.active_expert_parameters for moe in moes),
        )


def rms_norm(config: ModelConfig) -> RMSNorm:
    """Normalisation of the residual stream."""
    return RMSNorm(config.dim, config.norm_eps)
