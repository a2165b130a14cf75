"""The patches of streams and prefetching on a device with streams, and FSDP1's settings that need
one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload

from tests.harness.levels import extended
from tests.harness.ranks import run_ranks
from tests.harness.roots import WIDTH, gradients_of, make_root, streams_of, train_two
from tests.simulated_npu.ranks import BOTH_MODES, run_npu_ranks, simulated_npu


def two_roots(strategy: str, hybrid: bool, patched: bool) -> tuple[list[list[int]], list[Any]]:
    """Identifiers of the streams of two interleaved roots, and their gradients."""
    torch.npu.set_device(dist.get_rank())
    roots, gradients = train_two(strategy, hybrid, patched, device="npu")
    streams = [
        [stream for stream in streams_of(strategy, root) if isinstance(stream, torch.Stream)]
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
        (first, second), (same, other) = stock[rank][0], shared[rank][0]
        assert first != second and same == other
        assert len(set(same)) == len(set(first))  # a root's streams stay distinct


def prefetch(device: str, options: dict[str, Any]) -> list[Any]:
    if device == "npu":
        torch.npu.set_device(dist.get_rank())
    root = make_root("fsdp1", device=device, **options)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    results = []
    for index in range(2):
        torch.manual_seed(10 * index + dist.get_rank())
        root(torch.randn(4, WIDTH).to(device)).square().sum().backward()
        results.append(gradients_of(root))
        optimizer.step()
        optimizer.zero_grad()
    return results


FSDP1_OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch before": {
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "forward_prefetch": True,
    },
    "prefetch after": {
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "limit_all_gathers": False,
    },
    "no prefetch": {"backward_prefetch": None},
    "parameters on the host": {"cpu_offload": CPUOffload(offload_params=True)},
}


@BOTH_MODES
@pytest.mark.parametrize("name", FSDP1_OPTIONS)
def test_fsdp1_prefetching_and_offload_keep_gradients(name: str, mode: str) -> None:
    """Oracle: CPU ranks without offload, which PyTorch does not support there."""
    options = FSDP1_OPTIONS[name]
    ours = run_npu_ranks(2, prefetch, "npu", options, mode=mode)
    assert ours == run_ranks(
        2, prefetch, "cpu", {key: options[key] for key in options if key != "cpu_offload"}
    )


def gradients_without_waits(strategy: str) -> list[Any]:
    """Gradients without any waits between streams, as under a faulty patch."""
    simulated_npu.extension.set_waits(False)
    return two_roots(strategy, False, False)[1]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_delayed_streams_expose_missing_waits(strategy: str) -> None:
    """Oracle: the gradients with all waits; immediate streams do not expose missing ones."""
    right = [gradients for _, gradients in run_npu_ranks(2, two_roots, strategy, False, False)]
    assert run_npu_ranks(2, gradients_without_waits, strategy) == right
    assert run_npu_ranks(2, gradients_without_waits, strategy, mode="delayed") != right
