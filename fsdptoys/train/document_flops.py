"""Documents that are kept apart in training: whom the model masks, and what the attention of a step costs then.

A token that sees only its own document takes fewer FLOPs than half the square of a sequence, and a utilisation that
counted the square would flatter. So each rank counts the keys that its tokens see, from the token ids alone.
"""

from collections.abc import Sequence

from torch import Tensor

from fsdptoys.models import DecoderModel, attended_keys


class DocumentCounter:
    """FLOPs of a step's tokens, by the documents that they are in.

    Args:
        model: told to keep documents apart.
        document_end: the id that is the last of every document.
        seq_len: tokens of a sequence.
    """

    def __init__(self, model: DecoderModel, document_end: int, seq_len: int) -> None:
        model.document_end = document_end
        self._model = model
        self._document_end = document_end
        self._seq_len = seq_len

    def count(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Of a rank's micro-batches: tokens, and for each length of chunks twice the keys that they see."""
        keys = [
            sum(attended_keys(tokens_BT, self._document_end, chunk_len) for tokens_BT, _ in microbatches)
            for chunk_len in self._model.chunk_lens
        ]
        return [sum(tokens_BT.numel() for tokens_BT, _ in microbatches), *keys]

    def flops_per_token(self, counts: Sequence[int]) -> float:
        """FLOPs of forward and backward a token, from the sums of ``count`` over ranks."""
        tokens, *keys = counts
        means = {length: twice / 2 / max(1, tokens) for length, twice in zip(self._model.chunk_lens, keys, strict=True)}
        return self._model.flops_per_token_of_documents(self._seq_len, means)
