"""Several documents in one sequence, each attending only to itself.

A sequence is cut out of a stream of documents, so tokens of unrelated documents may precede a
token. The id that ends every document separates them: attention becomes block-diagonal, learned
positions and other position counts restart with each document, and the loss ignores the label after
an end. A document's logits are then those that it has alone, up to rounding. Rotary positions run
on, since only distances count. A sequence that begins within a document treats the rest of it as a
document.

Not covered: generation over a cache, which assumes one document.

Shapes: B batch, T sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .context import Context
from .ops import Ops


class Documents(NamedTuple):
    """Positions and masks of the documents of a batch."""

    positions_BT: Tensor
    """Position of each of this rank's tokens in its own document, int64."""
    masks: dict[int | None, Any]
    """Chunk length of an attention → mask for ``Context.attend``."""


def mask_documents(
    positions_BT: Tensor,
    chunk_lens: Sequence[int | None],
    context: Context,
    ops: Ops,
    dtype: torch.dtype,
) -> dict[int | None, Any]:
    """Make the masks that all attentions of a model share: chunk length → mask for
    ``Context.attend``.

    Args:
        positions_BT: of each token of the full sequences in its document.
        chunk_lens: of the attentions; None for the full document.
        context: of the attentions.
        ops: of the attentions.
        dtype: of queries and keys.
    """
    seq_len = positions_BT.shape[1]
    places_T = torch.arange(seq_len, device=positions_BT.device)
    lengths = {chunk_len: _within(chunk_len, seq_len) for chunk_len in chunk_lens}
    masks = {
        length: context.mask(places_T - positions_BT % length, ops, dtype)
        for length in set(lengths.values())
    }
    return {chunk_len: masks[length] for chunk_len, length in lengths.items()}


def document_positions(tokens_BT: Tensor, document_end: int) -> Tensor:
    """Position of each token in its document, int64 of the same shape."""
    places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    begins_BT = torch.zeros_like(tokens_BT)
    begins_BT[:, 1:] = torch.where(tokens_BT[:, :-1] == document_end, places_T[1:], 0)
    # A running maximum rather than a sum, whose order on CUDA is not fixed.
    return places_T - begins_BT.cummax(1).values


def attended_keys(tokens_BT: Tensor, document_end: int, chunk_len: int | None) -> int:
    """Twice the number of keys that all tokens see, counting itself as half, as in the causal half
    of a square."""
    positions_BT = document_positions(tokens_BT, document_end)
    return int((2 * (positions_BT % _within(chunk_len, tokens_BT.shape[1])) + 1).sum())


def _within(chunk_len: int | None, seq_len: int) -> int:
    return seq_len if chunk_len is None else min(chunk_len, seq_len)
