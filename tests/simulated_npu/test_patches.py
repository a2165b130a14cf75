"""The patches of streams and prefetching on a device with streams, and FSDP1's settings that need one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy, fully_shard

from fsdptoys.patches import apply_patches
from fsdptoys.patches.fsdp1_stream_reuse import STREAMS as FSDP1_STREAMS
from fsdptoys.patches.fsdp2_stream_reuse import STREAMS as FSDP2_STREAMS
from scripts.ranks import run_ranks
from tests.simulated_npu.ranks import MODES, run_npu_ranks, simulated_npu

WIDTH = 6


def make_root(strategy: str, device: str, seed: int, hybrid: bool = False, **options: Any) -> nn.Module:
    """Three blocks, each a unit, and the root around them."""
    if device == "npu":
        torch.npu.set_device(dist.get_rank())
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device) for _ in range(3)]
    ranks = dist.get_world_size()
    shape, names = ((ranks // 2, 2), ("replicate", "shard")) if hybrid else ((ranks,), ("shard",))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    if strategy == "fsdp2":
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(nn.Sequential(*blocks), mesh=mesh)
    options |= {"device_mesh": mesh, "device_id": blocks[0][0].weight.device}
    options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD}
    options |= {"use_orig_params": True}
    wrapped = [FullyShardedDataParallel(block, **options) for block in blocks]
    return FullyShardedDataParallel(nn.Sequential(*wrapped), **options)


def gradients(root: nn.Module) -> list[list[float]]:
    local = [param.grad for param in root.parameters() if param.grad is not None]
    return [(grad.to_local() if hasattr(grad, "to_local") else grad).flatten().tolist() for grad in local]


def streams_of(strategy: str, root: Any) -> list[int]:
    """Identifiers of a root's streams after its first forward."""
    owner = root if strategy == "fsdp1" else root._get_fsdp_state()._comm_ctx
    names = FSDP1_STREAMS if strategy == "fsdp1" else FSDP2_STREAMS
    return [stream.stream_id for name in names if isinstance(stream := getattr(owner, name, None), torch.Stream)]


def two_roots(strategy: str, device: str, hybrid: bool, patched: bool) -> tuple[list[list[int]], list[Any]]:
    """Streams and gradients of two roots, after two steps whose forwards and backwards are interleaved."""
    with apply_patches([f"{strategy}_stream_reuse"] if patched else [], strategy):
        roots = [make_root(strategy, device, seed, hybrid) for seed in (1, 2)]
        torch.manual_seed(dist.get_rank())
        batches = torch.randn(2, 2, 4, WIDTH)
        for index in range(2):
            losses = [root(batches[i, index].to(device)).square().sum() for i, root in enumerate(roots)]
            for loss in losses:
                loss.backward()
        streams = [streams_of(strategy, root) for root in roots] if device == "npu" else []
        return streams, [gradients(root) for root in roots]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hybrid", [False, True], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_patched_roots_share_streams_with_gradients_of_cpu_ranks(strategy: str, hybrid: bool, mode: str) -> None:
    """Oracle: gradients of CPU ranks, which have no streams; unpatched roots have streams of their own."""
    ranks = 4 if hybrid else 2
    expected = run_ranks(ranks, two_roots, strategy, "cpu", hybrid, False)
    stock = run_npu_ranks(ranks, two_roots, strategy, "npu", hybrid, False, mode=mode)
    shared = run_npu_ranks(ranks, two_roots, strategy, "npu", hybrid, True, mode=mode)
    for (_, theirs), (own, unpatched), (same, patched) in zip(expected, stock, shared, strict=True):
        assert theirs == unpatched == patched
        assert own[0] != own[1] and same[0] == same[1]
        assert len(set(same[0])) == len(set(own[0]))  # a root's streams stay distinct


def prefetch(device: str, options: dict[str, Any]) -> list[Any]:
    root = make_root("fsdp1", device, 1, **options)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    results = []
    for index in range(2):
        torch.manual_seed(10 * index + dist.get_rank())
        root(torch.randn(4, WIDTH).to(device)).square().sum().backward()
        results.append(gradients(root))
        optimizer.step()
        optimizer.zero_grad()
    return results


FSDP1_OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch before": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "forward_prefetch": True},
    "prefetch after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False},
    "no prefetch": {"backward_prefetch": None},
    "parameters on the host": {"cpu_offload": CPUOffload(offload_params=True)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FSDP1_OPTIONS)
def test_fsdp1_prefetching_and_offload_keep_gradients(name: str, mode: str) -> None:
    """Oracle: CPU ranks without offload, which PyTorch does not support there."""
    ours = run_npu_ranks(2, prefetch, "npu", FSDP1_OPTIONS[name], mode=mode)
    on_cpu = {key: value for key, value in FSDP1_OPTIONS[name].items() if key != "cpu_offload"}
    assert ours == run_ranks(2, prefetch, "cpu", on_cpu)


def gradients_without_waits(strategy: str) -> list[Any]:
    """Gradients without any waits between streams, as under a faulty patch."""
    simulated_npu.extension.set_waits(False)
    return two_roots(strategy, "npu", False, False)[1]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_delayed_streams_expose_missing_waits(strategy: str) -> None:
    """Oracle: the gradients with all waits; immediate streams do not expose missing ones."""
    right = [gradients for _, gradients in run_npu_ranks(2, two_roots, strategy, "npu", False, False)]
    assert run_npu_ranks(2, gradients_without_waits, strategy) == right
    assert run_npu_ranks(2, gradients_without_waits, strategy, mode="delayed") != right
