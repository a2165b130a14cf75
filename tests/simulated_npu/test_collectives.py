"""The simulated ``hccl`` returns gloo's results, and makes streams wait rather than the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.ranks import run_ranks
from tests.harness.processes import wait_until
from tests.simulated_npu.ranks import BOTH_MODES, run_npu_ranks

RANKS = 2


def collectives(device: str) -> dict[str, Any]:
    rank = dist.get_rank()
    x = (torch.arange(4.0) + 10 * rank).to(device)
    results: dict[str, list[torch.Tensor]] = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        results[op] = [x.clone()]
        dist.all_reduce(results[op][0], getattr(dist.ReduceOp, op))
    gathered, listed = torch.empty(8, device=device), [torch.empty(4, device=device) for _ in range(RANKS)]
    dist.all_gather_into_tensor(gathered, x)
    dist.all_gather(listed, x)
    scattered, swapped = torch.empty(2, device=device), torch.empty(4, device=device)
    dist.reduce_scatter_tensor(scattered, x)
    dist.all_to_all_single(swapped, x)
    sent, half, onto = x.clone(), x.to(torch.bfloat16), x.clone()
    dist.broadcast(sent, src=1)
    dist.all_reduce(half)
    dist.reduce(onto, dst=0)
    results["rest"] = [gathered, *listed, scattered, swapped, sent, half.float(), *([onto] if rank == 0 else [])]
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(x, 1)
    else:
        results["received"] = [torch.empty(4, device=device)]
        dist.recv(results["received"][0], 0)
    dist.barrier()
    numbers = {name: [tensor.cpu().tolist() for tensor in tensors] for name, tensors in results.items()}
    return {**numbers, "objects": objects}


@BOTH_MODES
def test_hccl_collectives_equal_gloo(mode: str) -> None:
    """Oracle: gloo on CPU tensors."""
    assert run_npu_ranks(RANKS, collectives, "npu", mode=mode) == run_ranks(RANKS, collectives, "cpu")


def average() -> list[float]:
    x = torch.tensor([1.0, 4.0], device="npu") * (1 + dist.get_rank())
    dist.all_reduce(x, dist.ReduceOp.AVG)
    half = torch.empty(1, device="npu")
    dist.reduce_scatter_tensor(half, x, dist.ReduceOp.AVG)
    return [*x.cpu().tolist(), *half.cpu().tolist()]


@BOTH_MODES
def test_average_is_the_sum_divided_by_the_world_size(mode: str) -> None:
    """Oracle: arithmetic."""
    assert run_npu_ranks(RANKS, average, mode=mode) == [[1.5, 6.0, 1.5], [1.5, 6.0, 6.0]]


def sum_is_right(waits: bool) -> bool:
    x = torch.ones(1000, device="npu")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    doubled = x * 2
    right = bool((doubled.cpu() == 2 * RANKS).all())
    work.wait()
    return right


@pytest.mark.parametrize("waits", [True, False])
def test_unwaited_collective_leaves_old_values_visible(waits: bool) -> None:
    """Oracle: the sum; only delayed mode exposes the mistake reliably."""
    assert run_npu_ranks(RANKS, sum_is_right, waits, mode="delayed") == [waits] * RANKS


def test_host_waiting_elsewhere_does_not_block_collectives(tmp_path: Path) -> None:
    """Oracle: the value 3; blocking would deadlock the ranks."""
    done = tmp_path / "done"

    def reduce_while_one_host_waits() -> float:
        x = torch.ones(3, device="npu")
        dist.broadcast(x, src=0)
        if dist.get_rank() == 1:
            total = float(x.sum())  # needs rank 0's part, which its host does not wait for
            done.touch()
            return total
        wait_until(done.exists, "the sum on rank 1")
        return float(x.sum())

    assert run_npu_ranks(RANKS, reduce_while_one_host_waits, mode="delayed") == [3.0, 3.0]
