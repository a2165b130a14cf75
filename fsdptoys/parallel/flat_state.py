"""FSDP1's parameters and optimizer states, resharded along the first dim, by FSDP1's public state-dict functions."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from .init_weights import shared_parameters


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> "FlatState | None":
    """State of a model; None where FSDP1 does not wrap it. A collective."""
    return FlatState(model, optimizer) if isinstance(model, FullyShardedDataParallel) else None


class FlatState:
    """Parameters and optimizer states with the names of ``state``."""

    def __init__(self, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        with _sharded_form(model):
            self._weights: dict[str, Tensor] = model.state_dict()
            # torch.distributed.checkpoint's would let an optimizer without states take a step.
            self._optim: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        # model.state_dict() has a shared weight under each of its names; here it has the first.
        self._names = [name for group in self._optim["param_groups"] for name in group["params"]]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, to read or to fill in place."""
        tensors = {f"model.{name}": self._weights[name] for name in self._names}
        for name, state in self._optim["state"].items():
            tensors |= {f"optim.{name}.{kind}": value for kind, value in state.items() if isinstance(value, Tensor)}
        return tensors

    def install(self) -> None:
        """Scatter the filled tensors."""
        if self._weights.keys() > set(self._names):
            with FullyShardedDataParallel.summon_full_params(self._model, recurse=False, writeback=False):
                shared = shared_parameters(self._model)
            for alias, name in shared.items():
                self._weights[_own_name(alias)] = self._weights[_own_name(name)]
        with _sharded_form(self._model):
            self._model.load_state_dict(self._weights)
            states = FullyShardedDataParallel.optim_state_dict_to_load(self._model, self._optimizer, self._optim)
        self._optimizer.load_state_dict(states)


@contextmanager
def _sharded_form(model: FullyShardedDataParallel) -> Iterator[None]:
    with warnings.catch_warnings():
        # FSDP1 warns that these functions are deprecated, and about sharding on one rank.
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        ):
            yield


def _own_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
