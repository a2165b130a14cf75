"""Failures of ranks that tests and scripts start."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from scripts.ranks import run_ranks


def lose_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def lose_the_only_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("ranks", "function"), [(2, lose_rank_1), (1, lose_the_only_rank)])
def test_failure_names_the_rank_that_a_signal_ended(ranks: int, function: Callable[[], None]) -> None:
    """Oracle: the signal, beside what is left to report: a lost connection, or nothing."""
    with pytest.raises(RuntimeError, match=rf"(?s)rank .*\nrank {ranks - 1} was ended by SIGKILL$"):
        run_ranks(ranks, function)
