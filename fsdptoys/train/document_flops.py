"""FLOPs of attention under document masking.

A token that attends to its own document only takes fewer FLOPs than causal attention over the full sequence, and an MFU
computed from the latter would be too high. So each rank counts the attended keys from the token ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.data.dataset import TokenDataset
from fsdptoys.models import DecoderModel, attended_keys


class DocumentCounter:
    """Counts attended keys per step and turns them into FLOPs per token; turns the model's document masking on."""

    def __init__(self, model: DecoderModel, document_end: int, seq_len: int) -> None:
        model.document_end = document_end
        with torch.device("meta"):
            self._model: DecoderModel = model.config.build()  # ranks may have a part of the given one
        self._document_end = document_end
        self._seq_len = seq_len

    @property
    def n_counts(self) -> int:
        """Number of the results of ``count``."""
        return 1 + len(self._model.chunk_lens)

    def count(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Return the number of tokens in a rank's micro-batches, then per chunk length twice their attended keys."""
        keys = [
            sum(attended_keys(tokens_BT, self._document_end, chunk_len) for tokens_BT, _ in microbatches)
            for chunk_len in self._model.chunk_lens
        ]
        return [sum(tokens_BT.numel() for tokens_BT, _ in microbatches), *keys]

    def flops_per_token(self, counts: Sequence[int]) -> float:
        """FLOPs of forward and backward per token, from the results of ``count`` summed over ranks."""
        tokens, *keys = counts
        means = {length: twice / 2 / max(1, tokens) for length, twice in zip(self._model.chunk_lens, keys, strict=True)}
        return self._model.flops_per_token_of_documents(self._seq_len, means)


def build_document_counter(model: DecoderModel, config: Config, dataset: TokenDataset) -> DocumentCounter | None:
    """The counter of a run; None where documents are not kept apart."""
    if not config.data.mask_documents:
        return None
    return DocumentCounter(model, dataset.end_labels_with_documents(), config.train.seq_len)
