"""The decoder that all families share, with the part names that strategies wrap.

A family is a config class and a model class (see ``docs/models.md``). All are stacks of
pre-normalized blocks between an embedding and a head, whose forward is here; a family builds the
blocks.

Shapes: B batch, T sequence, D width, V vocabulary, N = B·T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .cache import KeyValueCache
from .config import ModelConfig, NativeConfig
from .context import FULL_SEQUENCES, Context
from .documents import Documents, document_positions, mask_documents
from .huggingface import FamilyFormat, WeightsFormat
from .initial import normal
from .layers import Block, Embedding, LMHead, LossFn
from .moe import MoE
from .ops import Layer
from .self_attention import Attention
from .stages import Stage

RowInitializer = Callable[[str, Tensor, torch.Generator], None]


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a shared weight counts once."""

    total: int
    embedding: int
    """Token and position embeddings, including a shared head."""
    experts: int
    """Routed experts."""
    active: int
    """Used by one token: all except the experts it is not routed to."""

    @property
    def dense(self) -> int:
        """Outside embeddings and routed experts."""
        return self.total - self.embedding - self.experts


class Constant(Protocol):
    """A table that a model computes with, beside its buffers."""

    def materialize(self, device: torch.device) -> None:
        """Make it on a device."""


class DecoderModel(Layer, ABC):
    """A causal language model; on the meta device it takes no memory until a strategy materializes
    it.

    This class is what strategies, planner and trainer know of any model.
    """

    config: ModelConfig
    embed_tokens: nn.Module
    """Token ids_BT → hidden_BTD."""
    layers: nn.ModuleList
    """Blocks, each a ``RunnableBlock``."""
    norm: nn.Module
    """Normalization before the head."""
    lm_head: nn.Module
    """``lm_head(hidden_BTD, labels_BT, loss_fn)``: logits, or the loss computed inside the head's
    own forward."""
    blocks_name: str = "layers"
    """Path of ``layers``; empty without blocks."""
    embedding_names: tuple[str, ...] = ("embed_tokens",)
    """Paths of the modules that form the first unit; empty if the root has them."""
    head_names: tuple[str, ...] = ("norm", "lm_head")
    """Paths of the modules that form the last unit, the head as the last; empty if the root has
    them."""
    parts: tuple[str, ...] = ("attn", "mlp")
    """Names of a block's parts that can be units by themselves."""
    chunk_lens: Sequence[int | None] = ()
    """Chunk lengths of the blocks' attentions, each once."""
    document_end: int | None = None
    """The id that ends every document, to keep documents apart (``documents``); None to attend
    across documents."""
    context: Context = FULL_SEQUENCES
    """Keeps this rank's part of the sequences."""
    constants: Sequence["Constant"] = ()
    """Tables that are made with the buffers."""
    swaps_blocks: bool = False
    """Whether modules of a block read parameters of one another."""
    float32_modules: Sequence[str] = ()
    """Names of modules that compute with float32 parameters whatever ``parallel.param_dtype``
    says."""

    @abstractmethod
    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens_BT: token ids of full sequences, int64.
            labels_BT: the next id at each position, or ``-100`` for ignored positions.
            loss_fn: called by the head as ``loss_fn(hidden_ND, weight_VD, labels_N)``.
            cache: of the tokens before these, which are added to it; without gradients only, and as
                one document.
            stage: the part to run, after which the caller counts the tokens in the cache; None for
                all.
            hidden_BTD: the result of the stage before, of this rank's part of the sequences.

        Returns:
            After any stage but the last, hidden_BTD. Otherwise logits_BTV in the parameters' dtype,
            or ``loss_fn``'s scalar if labels are given, of this rank's part of the sequences.
        """

    @abstractmethod
    def row_initializer(self) -> RowInitializer:
        """Return ``init_rows(name, rows, generator)``, which writes initial values into consecutive
        rows of the named parameter seen as a matrix.

        Call it before float8, adapters or a strategy replace modules.
        """

    def zero_rows(self) -> Mapping[str, Sequence[int]]:
        """Rows of parameters that are zero whatever ``row_initializer`` writes, by name."""
        return {}

    def init_buffers(self, device: torch.device) -> None:
        """Compute the non-persistent buffers on ``device``; construction on the meta device leaves
        them empty."""
        for constant in self.constants:
            constant.materialize(device)

    @property
    def weights_format(self) -> WeightsFormat | None:
        """Where the weights are in a folder in Hugging Face format; None without such folders."""
        style = self.config.hugging_face
        return None if style is None else FamilyFormat(style, self.config)

    def cast_buffers(self, buffer_dtype: torch.dtype, param_dtype: torch.dtype) -> None:
        """Cast the computed floating-point buffers.

        Args:
            buffer_dtype: for a model whose buffers the user chooses the dtype of.
            param_dtype: of the computation.
        """
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(buffer_dtype))

    def initial_tensors(self, seed: int) -> Mapping[str, Tensor] | None:
        """Initial values of all parameters by name, of a model that has them in full; None where
        ``row_initializer`` draws them."""
        return None

    def block_kind(self, index: int) -> tuple[object, ...]:
        """Return a key of a block. Blocks with equal keys do the same work."""
        block = self.layers[index]
        return (tuple((name, param.shape) for name, param in block.named_parameters()),)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token: 6 per weight of a matmul, attention over half
        the square.

        A frozen weight has 4: its gradient is not computed.

        Only a token's active experts count. Embeddings and the recomputation of gradient
        checkpointing do not, so utilization by this number is model FLOPs utilization
        (arXiv:2204.02311, appendix B, with the causal half: on average a token attends to half of
        the sequence).
        """
        return flops_per_token([self], seq_len)

    def flops_per_token_of_documents(
        self, seq_len: int, mean_keys: Mapping[int | None, float]
    ) -> float:
        """FLOPs per token where documents are kept apart.

        Args:
            seq_len: tokens of a sequence.
            mean_keys: chunk length of an attention → mean number of keys that a token sees.
        """
        flops = self.flops_per_token(seq_len)
        for module in self.modules():
            if isinstance(module, Attention):
                flops += module.flops_per_key * mean_keys[
                    module.chunk_len
                ] - module.own_flops(seq_len)
        return flops

    def parameter_counts(self) -> ParameterCounts:
        """Count parameters by purpose."""
        moes = [module for module in self.modules() if isinstance(module, MoE)]
        embeddings = [
            module for module in self.modules() if isinstance(module, nn.Embedding)
        ]
        total = sum(param.numel() for param in self.parameters())
        experts = sum(moe.expert_parameters for moe in moes)
        return ParameterCounts(
            total=total,
            embedding=sum(module.weight.numel() for module in embeddings),
            experts=experts,
            active=total - experts + sum(moe.active_expert_parameters for moe in moes),
        )


class NativeModel(DecoderModel):
    """A stack of pre-normalized blocks; a family builds the blocks."""

    def __init__(
        self, config: NativeConfig, blocks: Sequence[Block], norm: nn.Module
    ) -> None:
        super().__init__()
        self.config = config
        attentions = (block.attn for block in blocks)
        self.chunk_lens = list(
            dict.fromkeys(
                attn.chunk_len for attn in attentions if isinstance(attn, Attention)
            )
        )
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.lm_head = LMHead(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Token ids to hidden_BTD, before the first block; positions are (T,), or (B, T) within
        documents."""
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT)
        return hidden_BTD

    def rotations(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines at these positions, for every block's attention; None without rotary
        positions."""
        return None

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position; see ``DecoderModel``."""
        # of one token there are no parts
        self.exchange.begin(in_full=labels_BT is None)
        start = 0 if cache is None else cache.length
        seq_len = tokens_BT.shape[1]
        context = self.context if cache is None else FULL_SEQUENCES
        positions_T = context.cut(
            torch.arange(start, start + seq_len, device=tokens_BT.device), 0
        )
        positions = positions_T
        documents = None
        if self.document_end is not None and cache is None:
            positions_BT = document_positions(tokens_BT, self.document_end)
            positions = context.cut(positions_BT, 1)
        tokens_BT = context.cut(tokens_BT, 1)
        labels_BT = None if labels_BT is None else context.cut(labels_BT, 1)
        rotations = self.rotations(positions_T)
        if stage is None or stage.embeds:
            hidden_BTD = self.embed(tokens_BT, positions)
        assert hidden_BTD is not None
        if self.document_end is not None and cache is None:
            masks = mask_documents(
                positions_BT, self.chunk_lens, context, self.ops, hidden_BTD.dtype
            )
            documents = Documents(positions, masks)
        for layer in self.layers if stage is None else stage.blocks(self.layers):
            hidden_BTD = layer(hidden_BTD, rotations, cache, documents)
        if stage is not None and not stage.predicts:
            return hidden_BTD
        if stage is None and cache is not None:
            cache.length += seq_len
        output: Tensor = self.lm_head(self.norm(hidden_BTD), labels_BT, loss_fn)
        return output

    def row_initializer(self) -> RowInitializer:
        """Draw each parameter as its layer says (``Layer.initial``)."""
        config = self.config
        assert isinstance(config, NativeConfig)
        initial = {
            f"{prefix}.{name}": layer.initial.get(name, normal)
            for prefix, layer in self.named_modules()
            if isinstance(layer, Layer)
            for name, _ in layer.named_parameters(recurse=False)
        }

        def init_rows(name: str, rows: Tensor, generator: torch.Generator) -> None:
            initial[name](rows, generator, config)

        return init_rows

    def block_kind(self, index: int) -> tuple[object, ...]:
        """Shapes of the parameters, and the way of attention."""
        attention = self.layers[index].get_submodule("attn")
        return (
            *super().block_kind(index),
            getattr(attention, "rotation", None) is None,
            getattr(attention, "temperature", None) is None,
            getattr(attention, "chunk_len", None),
        )


def flops_per_token(modules: Iterable[nn.Module], seq_len: int) -> float:
    """FLOPs of forward and backward per token of modules and all that they contain."""
    layers = (layer for module in modules for layer in module.modules())
    return sum(layer.own_flops(seq_len) for layer in layers if isinstance(layer, Layer))


def use_context(model: DecoderModel, context: Context) -> None:
    """Set how a model and its attentions share sequences with other ranks."""
    model.context = context
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context
