"""Exercise 7, before ``fsdptoys/toys/cp.py``: attention to keys that no rank has whole.

Each rank has the queries, keys and values of its part of a sequence. Keys and values pass round a
ring, so that a rank sees those of one rank at a time. But a softmax needs the sum over all keys,
and no rank may keep all scores.

Two results of attention to different keys can be merged if each comes with the logarithm of its
denominator, the sum of exponentials. Exponentials of large scores are infinite, and their
differences are not: see ``torch.logsumexp`` and ``torch.logaddexp``. If all ranks send before they
receive, all may wait: see ``dist.batch_isend_irecv``.
"""

from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, without a mask: softmax(q·kᵀ /
    √columns)·v.

    Nothing but sends and receives, at most (N−1) times the elements of ``k`` and ``v``; and no
    tensor as large as the scores of all keys.

    Args:
        q: this rank's queries, (rows, columns).
        k: this rank's keys, likewise.
        v: this rank's values, likewise.
    """
    raise NotImplementedError
