"""The simulated ``hccl`` returns gloo's results, and makes streams wait rather than the host."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.ranks import run_ranks
from tests.simulated_npu.ranks import MODES, run_npu_ranks

RANKS = 2


def collectives(device: str) -> dict[str, Any]:
    rank = dist.get_rank()
    x = (torch.arange(4.0) + 10 * rank).to(device)
    results: dict[str, Any] = {}

    def keep(name: str, *tensors: torch.Tensor) -> None:
        results[name] = [tensor.cpu().tolist() for tensor in tensors]

    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        reduced = x.clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, op))
        keep(op, reduced)
    gathered = torch.empty(8, device=device)
    dist.all_gather_into_tensor(gathered, x)
    listed = [torch.empty(4, device=device) for _ in range(RANKS)]
    dist.all_gather(listed, x)
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, x)
    sent = x.clone()
    dist.broadcast(sent, src=1)
    swapped = torch.empty(4, device=device)
    dist.all_to_all_single(swapped, x)
    half = x.to(torch.bfloat16)
    dist.all_reduce(half)
    onto = x.clone()
    dist.reduce(onto, dst=0)
    keep("rest", gathered, *listed, scattered, sent, swapped, half.float(), *([onto] if rank == 0 else []))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    if rank == 0:
        dist.send(x, 1)
    else:
        received = torch.empty(4, device=device)
        dist.recv(received, 0)
        keep("received", received)
    dist.barrier()
    return results


@pytest.mark.parametrize("mode", MODES)
def test_hccl_collectives_equal_gloo(mode: str) -> None:
    """Oracle: gloo on CPU tensors."""
    assert run_npu_ranks(RANKS, collectives, "npu", mode=mode) == run_ranks(RANKS, collectives, "cpu")


def average() -> list[float]:
    x = torch.tensor([1.0, 4.0], device="npu") * (1 + dist.get_rank())
    dist.all_reduce(x, dist.ReduceOp.AVG)
    half = torch.empty(1, device="npu")
    dist.reduce_scatter_tensor(half, x, dist.ReduceOp.AVG)
    return [*x.cpu().tolist(), *half.cpu().tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_average_is_the_sum_divided_by_the_world_size(mode: str) -> None:
    """Oracle: arithmetic."""
    assert run_npu_ranks(RANKS, average, mode=mode) == [[1.5, 6.0, 1.5], [1.5, 6.0, 6.0]]


def unwaited(waits: bool) -> bool:
    x = torch.ones(1000, device="npu")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    doubled = x * 2
    right = bool((doubled.cpu() == 2 * RANKS).all())
    work.wait()
    return right


def test_unwaited_collective_leaves_old_values_visible() -> None:
    """Oracle: the sum; only delayed mode exposes the mistake reliably."""
    assert run_npu_ranks(RANKS, unwaited, True, mode="delayed") == [True, True]
    assert run_npu_ranks(RANKS, unwaited, False, mode="delayed") == [False, False]


def reduce_while_one_host_waits(folder: str) -> float:
    x = torch.ones(3, device="npu")
    dist.broadcast(x, src=0)
    path = os.path.join(folder, "done")
    if dist.get_rank() == 1:
        total = float(x.sum())  # needs rank 0's part, which its host does not wait for
        open(path, "x").close()
        return total
    while not os.path.exists(path):
        pass
    return float(x.sum())


def test_host_waiting_elsewhere_does_not_block_collectives(tmp_path: Any) -> None:
    """Oracle: the value 3; blocking would deadlock the ranks."""
    assert run_npu_ranks(RANKS, reduce_while_one_host_waits, str(tmp_path), mode="delayed") == [3.0, 3.0]
