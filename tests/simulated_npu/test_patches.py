"""The patches of streams and prefetching on a device with streams."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.levels import extended
from tests.harness.ranks import run_ranks
from tests.harness.roots import streams_of, train_two
from tests.simulated_npu.ranks import BOTH_MODES, run_npu_ranks, simulated_npu


def two_roots(
    strategy: str, hybrid: bool, patched: bool
) -> tuple[list[list[int]], list[Any]]:
    """Identifiers of the streams of two interleaved roots, and their gradients."""
    torch.npu.set_device(dist.get_rank())
    roots, gradients = train_two(strategy, hybrid, patched, device="npu")
    streams = [
        [
            stream
            for stream in streams_of(strategy, root)
            if isinstance(stream, torch.Stream)
        ]
        for root in roots
    ]
    return [[stream.stream_id for stream in of_root] for of_root in streams], gradients


@BOTH_MODES
@pytest.mark.parametrize("hybrid", [False, extended(True)], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_patched_roots_share_streams_with_gradients_of_cpu_ranks(
    strategy: str, hybrid: bool, mode: str
) -> None:
    """Oracle: gradients of CPU ranks, which have no streams; unpatched roots have streams of their
    own."""
    ranks = 4 if hybrid else 2
    expected = run_ranks(ranks, lambda: train_two(strategy, hybrid, False)[1])
    stock = run_npu_ranks(ranks, two_roots, strategy, hybrid, False, mode=mode)
    shared = run_npu_ranks(ranks, two_roots, strategy, hybrid, True, mode=mode)
    for rank in range(ranks):
        assert expected[rank] == stock[rank][1] == shared[rank][1]
        first, second = stock[rank][0]
        same, other = shared[rank][0]
        assert first != second and same == other
        assert len(set(same)) == len(set(first))  # a root's streams stay distinct


def gradients_without_waits(strategy: str) -> list[Any]:
    """Gradients without any waits between streams, as under a faulty patch."""
    simulated_npu.extension.set_waits(False)
    return two_roots(strategy, False, False)[1]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_delayed_streams_expose_missing_waits(strategy: str) -> None:
    """Oracle: the gradients with all waits; immediate streams do not expose missing ones."""
    right = [
        gradients
        for _, gradients in run_npu_ranks(2, two_roots, strategy, False, False)
    ]
    assert run_npu_ranks(2, gradients_without_waits, strategy) == right
    assert run_npu_ranks(2, gradients_without_waits, strategy, mode="delayed") != right
