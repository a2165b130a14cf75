"""How many bytes of parameters, gradients and optimizer states are live, on the device and in host memory.

Bytes in words.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdptoys.utils.dtensor import (
    is_dtensor,
)


@dataclass(frozen=True)
class PlacedBytes:
    """Bytes by where they are; on a CPU all are in host memory."""

    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class LiveBytes:
    """What a rank keeps between steps: its shards where a strategy shards."""

    parameters: PlacedBytes = field(default_factory=PlacedBytes)
    gradients: PlacedBytes = field(default_factory=PlacedBytes)
    states: PlacedBytes = field(default_factory=PlacedBytes)

    @property
    def device_bytes(self) -> int:
        """All of it that is on the device."""
        return self.parameters.device_bytes + self.gradients.device_bytes + self.states.device_bytes

    def on_host(self) -> "LiveBytes":
        """What is in host memory, as if that were the device: for a CPU it is."""
        return LiveBytes(*(PlacedBytes(part.host_bytes) for part in (self.parameters, self.gradients, self.states)))


def live_bytes(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None, held_gradients: Iterable[Tensor] = ()
) -> LiveBytes:
    """Count what is allocated now.

    A storage counts once, whole, for the first of parameters, gradients and states that has it. Of sharded parameters
    this rank's shard counts; what a strategy gathers for the forward, and gradients not reduced yet, do not.

    Args:
        parameters: as the strategy left them.
        optimizer: whose states count, wherever in ``optimizer.state`` they are; None before there is one.
        held_gradients: those that are no parameter's any more, and that the optimizer still needs.
    """
    parameters = list(parameters)
    seen: set[tuple[torch.device, int]] = set()
    states = optimizer.state.values() if optimizer is not None else ()
    return LiveBytes(
        parameters=_count(iter(parameters), seen),
        gradients=_count(iter([*(p.grad for p in parameters if p.grad is not None), *held_gradients]), seen),
        states=_count(_tensors(states), seen),
    )


def _count(tensors: Iterator[Tensor], seen: set[tuple[torch.device, int]]) -> PlacedBytes:
    device_bytes = host_bytes = 0
    for tensor in tensors:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        storage = local.untyped_storage()
        key = (local.device, storage.data_ptr())
        if local.is_meta or storage.nbytes() == 0 or key in seen:
            continue
        seen.add(key)
        if local.device.type == "cpu":
            host_bytes += storage.nbytes()
        else:
            device_bytes += storage.nbytes()
    return PlacedBytes(device_bytes, host_bytes)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _tensors(item)
