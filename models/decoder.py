"""The parts that every model has, by the names under which the parallel strategies wrap them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .layers import LossFn


class DecoderModel(nn.Module, ABC):
    """A causal language model; built on the meta device, it costs no memory until a strategy materialises it."""

    embed_tokens: nn.Module
    """Token ids_BT → hidden_BTD."""
    layers: nn.ModuleList
    """Blocks, each with the parts ``attn`` and ``mlp``."""
    norm: nn.Module
    """Normalisation before the head."""
    lm_head: nn.Module
    """``lm_head(hidden_BTD, labels_BT, loss_fn)``: logits, or the loss computed inside the head's own forward."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None, loss_fn: LossFn | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens_BT: token ids, int64.
            labels_BT: the id that should follow each position, or ``-100`` for positions that do not count.
            loss_fn: called by the head as ``loss_fn(hidden_ND, weight_VD, labels_N)``.

        Returns:
            logits_BTV in the parameters' dtype, or ``loss_fn``'s scalar where labels are given.
        """

    @abstractmethod
    def init_rows(self, name: str, rows: Tensor, generator: torch.Generator) -> None:
        """Fill ``rows``, consecutive rows of the parameter called ``name``, with initial values in place."""

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Make the non-persistent buffers on ``device``, which a meta-device construction leaves empty."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward a token: 6 for each weight of a matrix product, attention over half the square.

        The embedding look-up counts nothing; recomputation under gradient checkpointing is not counted either, so a
        utilisation made from this is model FLOPs utilisation (arXiv:2204.02311, appendix B, with the causal half).
        """
