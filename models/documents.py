"""Several documents in one sequence, each of which sees nothing but itself.

A sequence is cut out of a stream of documents, so a token can have others before it that have nothing to do with it.
Where the id that ends every document is known, the token ids tell which belong together: attention becomes
block-diagonal, learned positions and everything else that counts positions begin anew with each document, and the loss
leaves out what follows an end. So a document's logits are those that it would have by itself, but for roundings.
Rotary positions run on, since only distances count there. A sequence that begins within a document takes the rest of
it for a document.

Not covered: generation over a cache, which knows one document.

Shapes: B batch, T sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import Kernels


class Documents(NamedTuple):
    """What attention has to know of the documents of a batch."""

    positions_BT: Tensor
    """Of each token in its own document, int64."""
    seen: dict[int | None, Any]
    """Length of an attention's chunks → who sees whom, as ``Kernels.document_attention`` wants it."""


def mask_documents(
    positions_BT: Tensor, chunk_lens: Sequence[int | None], kernels: Kernels, dtype: torch.dtype
) -> Documents:
    """Make the masks that all attentions of a model share.

    Args:
        positions_BT: of each token in its document.
        chunk_lens: of the attentions; None for those that see the whole document.
        kernels: what will attend.
        dtype: of queries and keys.
    """
    seq_len = positions_BT.shape[1]
    places_T = torch.arange(seq_len, device=positions_BT.device)
    lengths = {chunk_len: _within(chunk_len, seq_len) for chunk_len in chunk_lens}
    masks = {
        length: kernels.document_attention.mask(places_T - positions_BT % length, dtype)
        for length in set(lengths.values())
    }
    return Documents(positions_BT, {chunk_len: masks[length] for chunk_len, length in lengths.items()})


def document_positions(tokens_BT: Tensor, document_end: int) -> Tensor:
    """Position of each token in its document, int64 of the same shape."""
    places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    begins_BT = torch.zeros_like(tokens_BT)
    begins_BT[:, 1:] = torch.where(tokens_BT[:, :-1] == document_end, places_T[1:], 0)
    # A running maximum rather than a sum, which CUDA adds up in any order.
    return places_T - begins_BT.cummax(1).values


def attended_keys(tokens_BT: Tensor, document_end: int, chunk_len: int | None) -> int:
    """Twice the keys that all tokens see together, each itself by half, as the causal half of a square is counted."""
    positions_BT = document_positions(tokens_BT, document_end)
    return int((2 * (positions_BT % _within(chunk_len, tokens_BT.shape[1])) + 1).sum())


def _within(chunk_len: int | None, seq_len: int) -> int:
    return seq_len if chunk_len is None else min(chunk_len, seq_len)
