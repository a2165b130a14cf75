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
from ..decoder import ParameterCounts, RowInitializer
from ..layers import LossFn
from ..stages import Stage
from .base import TransformersBase, TransformersSettings
from .blocks import make_runnable
from .buffers import buffer_dtypes, compute_buffers, float32_names
from .build import build_causal_lm
from .checks import check_parts, find_parts
from .counts import count_parameters, matmul_flops_per_token
from .head import TransformersHead, find_form
from .initial import RecordedInitialization


class TransformersModel(TransformersBase):
    """A model of transformers."""

    children_of_decoder: dict[str, str]
    """Name of a child here → its name in the decoder."""
    swaps_blocks = True

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
        for block in self.layers:
            make_runnable(block)
        self.parts = parts.names_of_block_parts
        self.hugging_face_names = _names_in(self, hf)
        self.float32_modules = float32_names(self, hf)
        check_parts(self, self.children_of_decoder, hf)

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
        if cache is not None:
            tokens_BT = cache.add_tokens(tokens_BT)
        hidden_BTD = self.hidden_states(tokens_BT)[:, -count:]
        output: Tensor = self.lm_head(hidden_BTD, labels_BT, loss_fn)
        return output

    def hidden_states(self, tokens_BT: Tensor) -> Tensor:
        """Return the input of the head."""
        output = self.decoder(input_ids=tokens_BT, use_cache=False)
        hidden_BTD: Tensor = output[0]
        return hidden_BTD if self._has_norm else self.norm(hidden_BTD)

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
