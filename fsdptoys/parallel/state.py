"""A run's parameters and optimizer states as tensors with plain names: the contents of a checkpoint
under any strategy.

Keys are ``model.<parameter>`` and ``optim.<parameter>.<state>``, with the names of the model before
it is wrapped (of a shared parameter the first), so a checkpoint of one strategy on N ranks loads
under another on M. Buffers are left out.

Where parameters keep their shape (one process, DDP, FSDP2) the tensors are the live ones, plain or
DTensors, which loading writes into without a copy. FSDP1 and toys that own parts in other shapes
have copies.

An optimizer before its first step gets the states that this step would start from. For a momentum
without a step counter they are -0.0, the neutral element of addition: PyTorch's SGD copies its
first gradient, and 0.0 would turn a gradient of -0.0 into 0.0.

Optimizer states must be tensors of their parameter's shape or numbers; others are refused. An
optimizer not derived from one of PyTorch's that creates its states in its first step is saved
without them before that, and gets those of a checkpoint before it is loaded.
Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.device import Streams, in_host_place, is_accelerator
from fsdptoys.errors import ConfigError
from fsdptoys.models.nf4 import is_packed
from fsdptoys.utils.dtensor import (
    full_tensor,
    is_dtensor,
    local_tensor,
    sharded_like,
    unwrapped,
)
from fsdptoys.utils.optimizer_states import kept_states

NamedParameters = Callable[[], Iterable[tuple[str, nn.Parameter]]]
"""Returns the optimizer's parameters by name, in the order of the model."""
Load = Callable[[dict[str, Tensor]], None]
"""Fills every tensor in place."""
ReadStates = Callable[[], dict[str, dict[str, Tensor]]]
"""Returns the saved parameters with an example of each of their states by its name: without dims
for a number, otherwise for the parameter's shape."""
Spread = Callable[[str, Tensor], Tensor]
"""Maps a parameter's name, and the parameter or one of its states, to the tensor to save."""


def keep(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


class State:
    """Live tensors of parameters that keep their shape; subclasses copy others.

    ``named_parameters`` has the names before wrapping; ``spread`` is ``Strategy.spread``.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        optimizer: torch.optim.Optimizer,
        spread: Spread = keep,
    ) -> None:
        settle(optimizer)
        self.named_parameters = list(named_parameters())
        self.optimizer = optimizer
        self._spread = spread

    def tensors(self) -> dict[str, Tensor]:
        """Plain tensors, the same on all ranks, and DTensors, to read or to fill in place. May be a
        collective.

        They may be live, and change in the next step; ``host_copy`` copies them.
        """
        tensors: dict[str, Tensor] = {}
        for name, param in self.named_parameters:
            tensors[f"model.{name}"] = self._spread(name, unwrapped(param))
            states = state_tensors(name, self.optimizer.state.get(param, {}))
            tensors |= {key: self._spread(name, state) for key, state in states.items()}
        return tensors

    def install(self, tensors: dict[str, Tensor]) -> None:
        """Use the values of the filled tensors. May be a collective.

        Hyperparameters, and the device and dtype of states, stay those of this run.
        """
        # Copies of parameters (cpu_offload_cast) detect writes by version counters.
        torch.autograd.graph.increment_version(
            [local_tensor(param) for _, param in self.named_parameters]
        )
        # The states are in place; an optimizer may keep more, such as a count of its steps.
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def state_tensors(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter's ``kept_tensors`` by their names in a checkpoint."""
    return {
        f"optim.{name}.{kind}": tensor
        for kind, tensor in kept_tensors(name, state).items()
    }


def kept_tensors(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a parameter's optimizer state; ConfigError for a value that is none."""
    for kind, value in state.items():
        if value is not None and not isinstance(value, Tensor):
            raise ConfigError(
                f"the optimizer keeps {kind} of {name} as {type(value).__name__}, which no "
                "checkpoint holds; keep it as a tensor of one number"
            )
    return {kind: value for kind, value in state.items() if value is not None}


@torch.no_grad()
def full_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every tensor in full, in the order of the names, on rank 0 as a CPU tensor; None on the
    other ranks.

    A collective: all ranks must exhaust it. A DTensor is gathered on every rank's device.
    """
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    for name, tensor in sorted(tensors.items()):
        whole = tensor
        if is_dtensor(tensor):
            on_mesh = tensor.to(tensor.device_mesh.device_type)
            assert is_dtensor(on_mesh)
            whole = full_tensor(on_mesh)
        yield name, whole.to("cpu") if first_rank else None


@torch.no_grad()
def host_copy(
    tensors: dict[str, Tensor], into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copy the tensors of a ``State`` to host memory, pinned if the source is on an accelerator.

    DTensors keep their placements. ``into`` is the unused result of an earlier call. Its memory is
    reused if it fits.
    """
    copies: dict[str, Tensor] = {}
    devices = set()
    for name, tensor in tensors.items():
        source = local_tensor(tensor)
        copy = (into or {}).get(name)
        if copy is None or _layout(copy) != _layout(tensor):
            local = torch.empty(
                source.shape,
                dtype=source.dtype,
                pin_memory=is_accelerator(source.device),
            )
            copy = sharded_like(tensor, in_host_place(local))
        copies[name] = copy
        local_tensor(copy).copy_(source, non_blocking=True)
        if is_accelerator(source.device):
            devices.add(source.device)
    # Each copy was issued on the stream that updates its tensor, behind the updates.
    for device in devices:
        Streams(device).current().synchronize()
    return copies


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Finish pending updates, and create the missing states of one of PyTorch's optimizers."""
    optimizer.state_dict()  # of a BucketedOptimizer: finishes updates
    params = [param for group in optimizer.param_groups for param in group["params"]]
    without = [param for param in params if _lacks_states(optimizer, param)]
    examples = kept_states(optimizer) if without and _is_of_torch(optimizer) else {}
    for param in without:
        _create_states(optimizer, param, examples)


def create_stored_states(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    read_states: ReadStates,
) -> None:
    """Create the states that a checkpoint has and that an optimizer not of PyTorch's creates in its
    first step only. A collective.

    A parameter with another name, such as FSDP1's flat ones, gets the states of all parameters.
    """
    settle(optimizer)
    if _is_of_torch(optimizer):
        return
    stored = read_states()
    of_all = {
        kind: state for states in stored.values() for kind, state in states.items()
    }
    for name, param in named_parameters:
        if _lacks_states(optimizer, param):
            _create_states(optimizer, param, stored.get(name, of_all))


def _lacks_states(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> bool:
    # FSDP1 keeps no state on a rank whose shard of a parameter is empty.
    return bool(param.numel()) and not optimizer.state.get(param)


def _create_states(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, examples: dict[str, Tensor]
) -> None:
    """Create a parameter's states. An example is of one number, or stands for the parameter's
    shape."""
    nothing = 0.0 if any(not example.ndim for example in examples.values()) else -0.0
    for kind, example in examples.items():
        if example.ndim:
            state = torch.zeros_like(param.detach(), dtype=example.dtype)
            local_tensor(state).fill_(nothing)
        else:
            state = torch.zeros((), dtype=example.dtype, device=example.device)
        optimizer.state[param][kind] = state


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    bases = (
        base for base in type(optimizer).__mro__ if base is not torch.optim.Optimizer
    )
    return any(base.__module__.startswith("torch.optim.") for base in bases)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    spread = (tensor.placements, tensor.device_mesh) if is_dtensor(tensor) else ()
    return tensor.shape, tensor.dtype, *spread


def unrounded(name: str, full: Tensor) -> Tensor:
    """A full parameter on the CPU: in float32, and a quantized weight, which a cast would destroy,
    as it is."""
    return full.to("cpu") if is_packed(name) else full.to("cpu", torch.float32)
