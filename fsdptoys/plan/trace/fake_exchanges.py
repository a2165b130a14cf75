"""Exchanges of tokens with ranks that do not exist.

The rows that a rank's experts receive depend on the router, so a trace assumes them: every rank sends equally many rows
to each, and the traced one receives ``plan.expert_imbalance`` times as many as it sends. As it is slower than the
others by this, they wait for it: its time is that of the step.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fsdptoys.parallel import expert_parallel

from .fake_device import replaced


@contextmanager
def assumed_loads(imbalance: float) -> Iterator[None]:
    """Let the traced rank receive ``imbalance`` times the mean of all ranks' rows."""
    with replaced((expert_parallel, "read_splits", functools.partial(_read_splits, imbalance))):
        yield


def _read_splits(imbalance: float, splits_2N: Tensor, rows: int) -> tuple[list[int], list[int]]:
    splits_2N.tolist()  # the host waits
    ranks = splits_2N.shape[1]
    return _even(rows, ranks), _even(min(round(rows * imbalance), rows * ranks), ranks)


def _even(rows: int, ranks: int) -> list[int]:
    """Rows divided as evenly as possible."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
