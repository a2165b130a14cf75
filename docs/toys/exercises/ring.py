"""Exercise 1, before the DDP: an all-reduce of your own, with nothing but sending and receiving.

Rank r may talk to rank r+1 and be talked to by rank r-1, in a ring. In which order do parts of the
tensor have to travel so that every rank ends up with the sum, and sends no more than 2·(N−1)/N of
the tensor?

Needed: ``torch.distributed.batch_isend_irecv`` with ``P2POp``, or ``isend`` and ``irecv``.
"""

from torch import Tensor


def all_reduce(tensor: Tensor) -> None:
    """Replace a tensor, on every rank, by the sum over all ranks.

    Args:
        tensor: flat and contiguous, as long on all ranks; its length need not be a multiple of
            their number, and may be below it.
    """
    raise NotImplementedError
