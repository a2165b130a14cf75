"""Optimizer offload: states live in host memory and pass through the device bucket by bucket.

Parameters and gradients stay on the device, which updates them; AdamW's two float32 states, twice the bytes of the
parameters, do not. What that costs is their way there and back in every step, and three buckets of device memory. Three
schedules run the same code:

- ``serial``: in ``step``, load, update and store one bucket after the other;
- ``pipelined``: in ``step``, with loads and stores of neighbouring buckets beside each update;
- ``lazy``: each bucket just before the next forward gathers its unit, so that transfers hide behind the forward; the
  gradients live until then. Not with FSDP1.

The bits of the parameters are those without offload, but for states that are kept in bfloat16. Where a part of the
states stays on the device (``memory.offload_fraction``), it is that of the units that the forward needs first: nothing
could hide their transfers.

Not covered: optimizers that do not work element by element. After ZeRO-Offload (arXiv:2101.06840), which updates on the
host instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.utils.dtensor import (
    local_tensor,
)

from .bucketed_optimizer import BucketedOptimizer
from .config import MemoryConfig, OffloadSchedule, StateDType
from .state_buckets import Bucket, Unit, cut_buckets
from .state_streaming import BUFFERS, Streaming, rounding_seeds
from .transfers import Transfers, transfers_for

MIB = 2**20


def resolve_schedule(
    schedule: OffloadSchedule, strategy: str, defers_updates: bool, reads_unit_by_unit: bool = True
) -> OffloadSchedule:
    """Replace ``auto`` by the best schedule that a strategy can.

    Args:
        schedule: what was asked for.
        strategy: the word after ``parallel=``.
        defers_updates: whether it may update parameters as late as the next forward.
        reads_unit_by_unit: whether that forward reads them late, so that it can hide anything.

    Raises:
        ConfigError: for ``lazy`` where it cannot.
    """
    if schedule is OffloadSchedule.auto:
        hides = defers_updates and reads_unit_by_unit
        return OffloadSchedule.lazy if hides else OffloadSchedule.pipelined
    if schedule is OffloadSchedule.lazy and not defers_updates:
        raise ConfigError(
            f"memory.offload_schedule=lazy is not an option of parallel={strategy}; set "
            "memory.offload_schedule=pipelined or parallel=fsdp2"
        )
    return schedule


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
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
    """Put the states of an optimizer that has taken no step into host memory, and return what to call instead of it.

    Args:
        optimizer: AdamW or SGD, over all parameters.
        units: every parameter once, by the module whose forward needs it first, in the order of the forward.
        config: with ``optimizer_offload``.
        device: where parameters and gradients are.
        model: what contains all units.
        schedule: not ``auto``.
        seed: for stochastic rounding.
        rank: likewise; shards must not round alike, and replicas must.
        units_ahead: units after its own that a unit's forward begins to gather.
        gather_after: lets what gathers parameters for a module's forward wait for an event.
        transfers: who copies; by default what the device has.
    """
    assert schedule is not OffloadSchedule.auto and not optimizer.state
    transfers = transfers or transfers_for(device)
    dtype = torch.bfloat16 if config.offload_state_dtype is StateDType.bfloat16 else torch.float32
    buckets = cut_buckets(optimizer, units, config.offload_bucket_mib * MIB, dtype)
    keep_on_device(buckets, config.offload_fraction)
    for bucket in buckets:
        if bucket.on_host:
            bucket.slab = transfers.host_tensor(bucket.elements, dtype)
        else:
            bucket.slab = torch.zeros(bucket.elements, device=local_tensor(bucket.params[0]).device)
    lazy = schedule is OffloadSchedule.lazy
    executor = Streaming(
        transfers,
        buckets,
        buffers=1 if schedule is OffloadSchedule.serial else BUFFERS,
        defers=lazy,
        dtype=dtype,
        rounding_seed=rounding_seeds(seed, rank),
    )
    return BucketedOptimizer(
        optimizer, units, buckets, executor, model=model, units_ahead=units_ahead, gather_after=gather_after
    )


def keep_on_device(buckets: Sequence[Bucket], fraction: float) -> None:
    """Mark which buckets stay: the first ones, as many as leave at least ``fraction`` of the states on the host."""
    total = on_host = sum(bucket.elements for bucket in buckets)
    for bucket in buckets:
        if on_host - bucket.elements < fraction * total:
            break
        on_host -= bucket.elements
        bucket.on_host = False
