"""Exercise 8, before ``fsdptoys/toys/ep.py``: rows that are computed on other ranks.

Each rank has a function, an expert say, and rows of which each names the rank whose function it
needs. No rank knows how many rows it will receive, and ``all_to_all_single`` wants these numbers
before it starts.

Needed: ``dist.all_to_all_single`` with splits, ``torch.autograd.Function``. Mind the rank that
receives nothing.
"""

from collections.abc import Callable

from torch import Tensor


def apply_elsewhere(rows: Tensor, targets: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to each row the function of the rank that it names.

    A forward takes three ``all_to_all_single``, its backward two. Gradients reach rows, and the
    parameters of a function; these are zero on a rank that received no rows.

    Args:
        rows: (own rows, columns), any number of them.
        targets: the rank for each row, int64.
        function: this rank's, from (any rows, columns) to the same shape.

    Returns:
        The results, in the order of ``rows``.
    """
    raise NotImplementedError
