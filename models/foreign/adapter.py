"""A causal language model of transformers with the interface of this project's models.

transformers builds the model on the meta device, and its own code computes it. The decoder's
children are registered here under the names that strategies know (``embed_tokens``, ``layers``,
``norm``, ``lm_head``); decoder and model themselves stay outside of the module tree, so that a
parameter has one name, and no unit holds another's parent. ``hugging_face_names`` maps names here
to those of transformers.

What a model cannot be trained right with is refused when it is built: see ``checks``.

Shapes: B batch, T sequence, D width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KeyValueCache
from ..context import FULL_SEQUENCES, Context
from ..decoder import ParameterCounts, RowInitializer
from ..documents import document_positions
from ..huggingface import WeightsFormat
from ..layers import LossFn
from ..stages import Stage
from .attention import NAME as ATTENTION
from .attention import (
    Sequences,
    choose_attention,
    register_attention,
    share_decoder,
)
from .base import TransformersBase, TransformersSettings
from .blocks import make_runnable
from .buffers import buffer_dtypes, compute_buffers, float32_names
from .build import build_causal_lm
from .checks import check_parts, find_parts
from .counts import count_parameters, matmul_flops_per_token
from .head import TransformersHead, find_form
from .initial import RecordedInitialization
from .weights import TransformersFormat, match_names


class TransformersModel(TransformersBase):
    """A model of transformers."""

    children_of_decoder: dict[str, str]
    """Name of a child here → its name in the decoder."""
    swaps_blocks = True
    chunk_lens = (None,)

    def __init__(self, config: TransformersSettings) -> None:
        super().__init__()
        self.config = config
        hf = build_causal_lm(config)
        parts = find_parts(hf)
        form = find_form(hf, parts.decoder, parts.head)
        object.__setattr__(self, "hf", hf)
        object.__setattr__(self, "decoder", parts.decoder)
        self.children_of_decoder = {}
        renamed = {parts.embedding: "embed_tokens", parts.blocks: "layers"}
        if parts.norm is not None:
            renamed[parts.norm] = "norm"
        for name, child in list(parts.decoder.named_children()):
            own_name = renamed.get(child, name)
            self.children_of_decoder[own_name] = name
            self.add_module(own_name, child)
        self._has_norm = parts.norm is not None
        if not self._has_norm:
            assert "norm" not in self.children_of_decoder
            self.norm = nn.Identity()
        parts.head.__class__ = TransformersHead
        parts.head.form = form
        self.lm_head = parts.head
        register_attention()
        self._attention_configs = [hf.config, parts.decoder.config]
        self._own_attention = hf.config._attn_implementation
        for block in self.layers:
            make_runnable(block)
        self.parts = parts.names_of_block_parts
        self.hugging_face_names = _names_in(self, hf)
        self.float32_modules = float32_names(self, hf)
        check_parts(self, self.children_of_decoder, hf)
        self._format = TransformersFormat(hf, match_names(self, hf), config)

    @property
    def weights_format(self) -> WeightsFormat:
        """transformers' own names and tensors."""
        return self._format

    def __setattr__(self, name: str, value: Any) -> None:
        """Show the decoder what a strategy sets in place of a child."""
        super().__setattr__(name, value)
        decoder_names = self.__dict__.get("children_of_decoder", {})
        if isinstance(value, nn.Module) and name in decoder_names:
            setattr(self.decoder, decoder_names[name], value)

    def train(self, mode: bool = True) -> "TransformersModel":
        """Set the mode of the decoder as well."""
        super().train(mode)
        self.decoder.training = mode
        self.hf.training = mode
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position; see ``DecoderModel``.

        With a cache all tokens are computed again, since each family has a cache of its own.
        """
        assert stage is None, "the configuration was not validated"
        count = tokens_BT.shape[1]
        context = self.context
        document_end = self.document_end
        if cache is not None:
            tokens_BT = cache.add_tokens(tokens_BT)
            context = FULL_SEQUENCES
            document_end = None
        if context.ranks > 1 or document_end is not None:
            if labels_BT is not None:
                labels_BT = context.cut(labels_BT, 1)
            hidden_BTD = self._hidden_parts(tokens_BT, context, document_end)
        else:
            choose_attention(self._attention_configs, self._own_attention)
            hidden_BTD = self.decoder(input_ids=tokens_BT, use_cache=False)[0]
            hidden_BTD = hidden_BTD[:, -count:]
        if not self._has_norm:
            hidden_BTD = self.norm(hidden_BTD)
        output: Tensor = self.lm_head(hidden_BTD, labels_BT, loss_fn)
        return output

    def _hidden_parts(
        self, tokens_BT: Tensor, context: Context, document_end: int | None
    ) -> Tensor:
        """Hidden states of this rank's part of sequences, with documents kept apart."""
        choose_attention(self._attention_configs, ATTENTION)
        positions_BT = None
        if document_end is not None:
            positions_BT = document_positions(tokens_BT, document_end)
        sequences = Sequences(context, self.ops, positions_BT)
        return share_decoder(self.decoder, sequences, tokens_BT)

    def initialization(self) -> RecordedInitialization:
        """Record transformers' initialization; on the meta device, before anything is replaced."""
        buffers = [
            self.decoder._buffers,
            *(module._buffers for module in self.modules()),
        ]
        return RecordedInitialization(
            self.hf,
            {param: name for name, param in self.named_parameters()},
            [
                buffer
                for own in buffers
                for buffer in own.values()
                if buffer is not None
            ],
        )

    def row_initializer(self) -> RowInitializer:
        """Repeat transformers' own initialization."""
        self._initialization = self.initialization()
        return self._initialization.row_initializer()

    def zero_rows(self) -> Mapping[str, Sequence[int]]:
        """Rows of padding tokens; call it after ``row_initializer``."""
        return self._initialization.zero_rows()

    def init_buffers(self, device: torch.device) -> None:
        """Compute buffers by transformers' own initialization."""
        compute_buffers(self, device)

    def cast_buffers(self, buffer_dtype: torch.dtype, param_dtype: torch.dtype) -> None:
        """Give each buffer the dtype that it has in a model of ``param_dtype``."""
        for (module, name), dtype in buffer_dtypes(self, param_dtype).items():
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = buffer.to(dtype)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token: 6 per weight of a matmul, attention over half
        the square; see ``counts``."""
        return matmul_flops_per_token(self, seq_len)

    def flops_per_token_of_documents(
        self, seq_len: int, mean_keys: Mapping[int | None, float]
    ) -> float:
        """FLOPs per token where documents are kept apart; a window's keys are bounded by them."""
        return matmul_flops_per_token(self, seq_len, most_keys=mean_keys[None])

    def block_kind(self, index: int) -> tuple[object, ...]:
        """Shapes of the parameters, class, and kind of layer."""
        kinds = getattr(self.hf.config, "layer_types", None)
        kind = kinds[index] if isinstance(kinds, (list, tuple)) else None
        block = self.layers[index]
        return (*super().block_kind(index), type(block).__name__, kind)

    def parameter_counts(self) -> ParameterCounts:
        """Count parameters by purpose."""
        return count_parameters(self)


def _names_in(model: nn.Module, hf: nn.Module) -> dict[str, str]:
    hf_names: dict[Tensor, str] = {}
    for list_tensors in (hf.named_parameters, hf.named_buffers):
        for name, tensor in list_tensors(remove_duplicate=False):
            hf_names.setdefault(tensor, name)
    return {
        name: hf_names[tensor]
        for list_tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in list_tensors()
    }
