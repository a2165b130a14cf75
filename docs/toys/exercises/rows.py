"""Exercise 4, with ``fsdptoys/toys/fsdp/layout.py``: parts of different sizes in one all-gather.

FSDP2 cuts a parameter along its rows as ``torch.chunk`` does, so that the last ranks may have
fewer, or none. But an all-gather into one tensor wants the same length from every rank.
"""

from torch import Tensor


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row of a rank, and the row after its last; those of ``torch.chunk``, and nothing where
    it gives nothing."""
    raise NotImplementedError


def gather_rows(shard: Tensor, rows: int) -> Tensor:
    """Put a tensor together from all ranks, with a single
    ``torch.distributed.all_gather_into_tensor``.

    Args:
        shard: this rank's rows, (own rows, columns).
        rows: of the whole tensor.

    Returns:
        (rows, columns), contiguous.
    """
    raise NotImplementedError
