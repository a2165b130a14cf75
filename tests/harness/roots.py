"""FSDP roots of three blocks, and the training of two; a patch may share their streams."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)

from fsdptoys.patches import apply_patches
from fsdptoys.patches.fsdp1_stream_reuse import STREAMS as FSDP1_STREAMS
from fsdptoys.patches.fsdp2_stream_reuse import STREAMS as FSDP2_STREAMS

WIDTH = 6
Gradients = list[list[float]]


def make_root(
    strategy: str,
    seed: int = 1,
    hybrid: bool = False,
    device: str = "cpu",
    **options: Any,
) -> FullyShardedDataParallel | nn.Module:
    """Three blocks, each a unit, and the root around them; ``options`` are FSDP1's."""
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device) for _ in range(3)
    ]
    ranks = dist.get_world_size()
    if hybrid:
        mesh = init_device_mesh(
            device, (ranks // 2, 2), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    if strategy == "fsdp2":
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(nn.Sequential(*blocks), mesh=mesh)
    options |= {
        "device_mesh": mesh,
        "device_id": next(blocks[0].parameters()).device,
        "use_orig_params": True,
    }
    options["sharding_strategy"] = (
        ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    )
    wrapped = [FullyShardedDataParallel(block, **options) for block in blocks]
    return FullyShardedDataParallel(nn.Sequential(*wrapped), **options)


def gradients_of(root: nn.Module) -> Gradients:
    """Return this rank's shards of the gradients."""
    grads = [param.grad for param in root.parameters() if param.grad is not None]
    return [
        (grad.to_local() if hasattr(grad, "to_local") else grad).flatten().tolist()
        for grad in grads
    ]


def streams_of(strategy: str, root: Any) -> list[Any]:
    """Return a root's streams in the order of the patch's list, after its first forward."""
    if strategy == "fsdp1":
        return [getattr(root, name) for name in FSDP1_STREAMS]
    return [
        getattr(root._get_fsdp_state()._comm_ctx, name, None) for name in FSDP2_STREAMS
    ]


def train_two(
    strategy: str, hybrid: bool, patched: bool, order: str = "abAB", device: str = "cpu"
) -> tuple[list[Any], list[Gradients]]:
    """Take two steps with two roots, with accumulation.

    Args:
        strategy: ``fsdp1`` or ``fsdp2``.
        hybrid: whether the roots replicate.
        patched: whether they share their streams.
        order: in which the roots ``a`` and ``b`` go forward (small letters) and backward
            (capitals).
        device: of the roots.

    Returns:
        The roots and their gradients.
    """
    with apply_patches([f"{strategy}_stream_reuse"] if patched else [], strategy):
        roots = {
            "a": make_root(strategy, 1, hybrid, device),
            "b": make_root(strategy, 2, hybrid, device),
        }
        torch.manual_seed(dist.get_rank())
        batches = {name: torch.randn(2, 4, WIDTH).to(device) for name in roots}
        losses = {}
        for index in range(2):
            for letter in order:
                if letter in roots:
                    losses[letter] = (
                        roots[letter](batches[letter][index]).square().sum()
                    )
                else:
                    losses[letter.lower()].backward()
        return list(roots.values()), [gradients_of(root) for root in roots.values()]
