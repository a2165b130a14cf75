"""Rows of causal attention: the queries of one piece of a sequence over the keys and values of the
full sequence.

Context parallelism computes a sequence's attention in pieces. Rows ``start`` to ``start + P`` see
keys up to their own position only, so a piece costs P × (start + P) scores at most, and pieces in
order add up to the causal half of the square. With chunks a piece is split where chunks begin;
whole chunks are computed as ever.

A piece that begins within a sequence needs a mask. Only its last P columns are triangular.
It is written out: ``causal_lower_right`` of PyTorch fails within the dispatch mode of selective
checkpointing (torch 2.13).

Shapes: B batch, P queries of the piece, S keys up to the last query, T tokens of the full sequence,
H query heads, G key/value heads, K width of a head.
"""

import functools

import torch
from torch import Tensor

from .context import FULL_SEQUENCES
from .ops import Ops


def attend_rows(
    q_BHPK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    start: int,
    ops: Ops,
    chunk_len: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Rows ``start`` to ``start + P`` of causal attention; returns the shape of the queries.

    Args:
        q_BHPK: queries of these rows.
        k_BGTK: keys of the full sequence, or of at least its first ``start + P`` tokens.
        v_BGTK: values of the same tokens.
        start: position of the first query.
        ops: of the attention; those of masks must take dense ones.
        chunk_len: length of the chunks within which tokens attend; None for the full sequence.
        mask: these rows of a dense mask (``kernels.dense_rows``), which has the chunks in it; None
            for one document.
    """
    end = start + q_BHPK.shape[2]
    if mask is not None:
        return ops.document_attention.attend(
            q_BHPK, k_BGTK[:, :, :end], v_BGTK[:, :, :end], mask
        )
    first = 0 if chunk_len is None else start - start % chunk_len
    if start == first:
        k_BGPK = k_BGTK[:, :, start:end]
        v_BGPK = v_BGTK[:, :, start:end]
        return FULL_SEQUENCES.attend(q_BHPK, k_BGPK, v_BGPK, ops, chunk_len)
    boundary = end if chunk_len is None else min(first + chunk_len, end)
    rows = boundary - start
    k_BGSK = k_BGTK[:, :, first:boundary]
    v_BGSK = v_BGTK[:, :, first:boundary]
    out_BHPK = _attend_last_rows(q_BHPK[:, :, :rows], k_BGSK, v_BGSK, ops)
    if boundary == end:
        return out_BHPK
    rest_BHPK = attend_rows(
        q_BHPK[:, :, rows:], k_BGTK, v_BGTK, boundary, ops, chunk_len
    )
    return torch.cat((out_BHPK, rest_BHPK), dim=2)


def _attend_last_rows(
    q_BHPK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, ops: Ops
) -> Tensor:
    """The last P rows of causal attention over S keys."""
    mask_PS = _kept_rows(q_BHPK.shape[2], k_BGSK.shape[2], q_BHPK.dtype, q_BHPK.device)
    return ops.document_attention.attend(q_BHPK, k_BGSK, v_BGSK, mask_PS)


def last_rows(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask of the last rows of a causal square."""
    with torch.inference_mode(False), torch.no_grad():
        added_PS = torch.zeros(rows, keys, dtype=dtype, device=device)
        added_PS[:, keys - rows :].fill_(-torch.inf).triu_(1)
        return added_PS


_kept_rows = functools.lru_cache(maxsize=8)(last_rows)
"""``last_rows`` of the last few sizes, which all layers share."""
