"""Live bytes of parameters, gradients and optimizer states, on the device and in host memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdptoys.utils.storages import storages_of


@dataclass(frozen=True)
class PlacedBytes:
    """Bytes by memory; a CPU has host memory only."""

    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class LiveBytes:
    """Bytes that a rank keeps between steps; shards if the strategy shards."""

    parameters: PlacedBytes = field(default_factory=PlacedBytes)
    gradients: PlacedBytes = field(default_factory=PlacedBytes)
    states: PlacedBytes = field(default_factory=PlacedBytes)

    @property
    def device_bytes(self) -> int:
        """Sum on the device."""
        return (
            self.parameters.device_bytes
            + self.gradients.device_bytes
            + self.states.device_bytes
        )

    def on_host(self) -> "LiveBytes":
        """The part in host memory, with host memory as the device, as on a CPU."""
        return LiveBytes(
            *(
                PlacedBytes(part.host_bytes)
                for part in (self.parameters, self.gradients, self.states)
            )
        )


def live_bytes(
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None,
    held_gradients: Iterable[Tensor] = (),
) -> LiveBytes:
    """Count the allocated bytes of this rank's shards, of gradients and states at any depth of
    ``optimizer.state``.

    A storage counts once, fully, for the first of parameters, gradients and states that uses it;
    gathered parameters and unreduced gradients do not count. ``held_gradients`` are detached, and
    still needed by the optimizer.
    """
    parameters = list(parameters)
    identities: set[int] = set()
    return LiveBytes(
        parameters=_count(parameters, identities),
        gradients=_count(
            [*(p.grad for p in parameters if p.grad is not None), *held_gradients],
            identities,
        ),
        states=_count(state_tensors(optimizer), identities),
    )


def state_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """The optimizer's states, at any depth."""
    return _tensors(optimizer.state.values() if optimizer is not None else ())


def _count(tensors: Iterable[Tensor], identities: set[int]) -> PlacedBytes:
    device_bytes = host_bytes = 0
    for identity, storage in storages_of(tensors).items():
        if identity in identities:
            continue
        identities.add(identity)
        if storage.device.type == "cpu":
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
