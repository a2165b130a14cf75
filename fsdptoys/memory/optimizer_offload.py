"""Optimizer offload: states live in host memory and stream through the device bucket by bucket.

Parameters and gradients stay on the device, which updates them. The price is two copies of the
states a step (AdamW's are twice the bytes of the parameters), and up to three buckets of device
memory. Three schedules share the code:

- ``serial``: in ``step``, load, update and store one bucket after the other;
- ``pipelined``, the default: in ``step``, loads and stores of neighboring buckets overlap with each
  update;
- ``lazy``: each bucket just before the next forward gathers its unit, so that copies overlap with
  the forward; the gradients live until then, and the buckets always. Not with FSDP1.

Parameters have the same bits as without offload, except with bfloat16 states. With
``memory.offload_fraction`` the states of the first units stay on the device, since nothing could
hide their copies.

Not covered: other than element-wise optimizers. After ZeRO-Offload (arXiv:2101.06840), which
updates on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdptoys.device import Device
from fsdptoys.utils.dtensor import local_tensor

from .bucketed_optimizer import BucketedOptimizer
from .config import MemoryConfig, OffloadSchedule
from .state_buckets import Bucket, UnitParams, make_buckets
from .state_streaming import BUFFERS, Streaming
from .transfers import StreamTransfers, Transfers

MIB = 2**20


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    units: Sequence[UnitParams],
    config: MemoryConfig,
    *,
    device: Device,
    model: nn.Module,
    schedule: OffloadSchedule,
    seed: int,
    rank: int,
    units_ahead: int = 0,
    gather_after: Callable[[nn.Module, Any], None] | None = None,
    transfers: Transfers | None = None,
) -> BucketedOptimizer:
    """Move the states of AdamW or SGD to host memory before its first step; returns the optimizer
    to use instead.

    Args:
        units, model, units_ahead, gather_after: as for ``BucketedOptimizer``.
        schedule: not ``auto``.
        rank: seeds stochastic rounding together with ``seed``; shards need different streams,
            replicas the same one.
    """
    assert schedule is not OffloadSchedule.auto and not optimizer.state
    transfers = transfers or (StreamTransfers if device.is_accelerator else Transfers)(
        device
    )
    dtype = config.offload_state_dtype.torch
    buckets = make_buckets(optimizer, units, config.offload_bucket_mib * MIB, dtype)
    keep_on_device(buckets, config.offload_fraction)
    for bucket in buckets:
        if bucket.on_host:
            bucket.slab = transfers.host_tensor(bucket.elements, dtype)
        else:
            bucket.slab = torch.zeros(
                bucket.elements, device=local_tensor(bucket.params[0]).device
            )
    lazy = schedule is OffloadSchedule.lazy
    executor = Streaming(
        transfers,
        buckets,
        buffers=1 if schedule is OffloadSchedule.serial else BUFFERS,
        defers=lazy,
        dtype=dtype,
        seeds=(seed, rank),
    )
    return BucketedOptimizer(
        optimizer,
        units,
        buckets,
        executor,
        model=model,
        units_ahead=units_ahead,
        gather_after=gather_after,
    )


def keep_on_device(buckets: Sequence[Bucket], fraction: float) -> None:
    """Keep the first buckets on the device, as many as leave at least ``fraction`` of the states on
    the host."""
    total = on_host = sum(bucket.elements for bucket in buckets)
    for bucket in buckets:
        if on_host - bucket.elements < fraction * total:
            break
        on_host -= bucket.elements
        bucket.on_host = False
