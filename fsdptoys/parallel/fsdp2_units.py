"""Settings of FSDP2's units: policies of precision and memory, and the order of prefetches."""

from typing import Any

import torch

from .fsdp import FSDPConfig
from .world import World


def unit_policies(
    library: Any, config: FSDPConfig, world: World, float32: bool = False
) -> dict[str, Any]:
    """Return the policies of a library's ``fully_shard``; with ``float32``, of a unit that computes
    in float32."""
    param_dtype = torch.float32 if float32 else config.param_dtype.torch
    if world.deterministic.uses_float64:
        param_dtype = torch.float64
    policies = {
        "mp_policy": library.MixedPrecisionPolicy(
            param_dtype=None if param_dtype is torch.float32 else param_dtype,
            reduce_dtype=config.reduce_dtype.torch,
            # The models keep rotary angles in float32 themselves; casting inputs would round them.
            cast_forward_inputs=False,
        )
    }
    if world.cpu_offload:
        policies["offload_policy"] = library.CPUOffloadPolicy(
            pin_memory=world.device.pins_memory
        )
    return policies


def set_prefetch(units: list[Any], ahead: int, behind: int, tied: bool) -> None:
    """Gather units before those that need them have begun.

    Args:
        units: first modules of the units, in the order of the forward.
        ahead: units to gather ahead in the forward; 0 leaves it to the device's queue.
        behind: the same in the backward.
        tied: whether the first unit has the head too.
    """
    for i, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
    if behind == 1:
        return  # FSDP2's default
    # The backward starts where the forward ends: with tied embeddings, in the unit of embedding
    # and head.
    order = [*units[1:], units[0]] if tied else units
    for i, unit in enumerate(order):
        # An empty list would mean the default of one unit; a unit that prefetches itself is
        # gathered already.
        unit.set_modules_to_backward_prefetch(
            order[max(0, i - behind) : i][::-1] or [unit]
        )
