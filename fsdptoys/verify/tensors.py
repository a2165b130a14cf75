"""Gradients, parameters and buffers of a trainer by the names of the model before it is wrapped."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.parallel.toy_ddp import ToyZero1
from fsdptoys.train.trainer import Trainer

from .measure import NamedTensors

WRAPPED = "_fsdp_wrapped_module."
"""Part of the names of modules below those of FSDP1."""


@contextmanager
@torch.no_grad()
def gradients(trainer: Trainer) -> Iterator[NamedTensors]:
    """The gradients as the norm sees them, in full or as DTensors; a collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = trainer.strategy.model
    if isinstance(trainer.strategy, ToyZero1):
        yield []  # it keeps this rank's part of them, in flat slices
    elif isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(
            model, with_grads=True, writeback=False
        ):
            yield [
                (name.replace(WRAPPED, ""), param.grad)
                for name, param in model.named_parameters()
                if param.grad is not None
            ]
    else:
        strategy = trainer.strategy
        yield [
            (name, strategy.spread(name, param.grad))
            for name, param in strategy.named_parameters()
            if param.grad is not None
        ]


def parameters(trainer: Trainer) -> NamedTensors:
    """The parameters, in full or as DTensors; a collective."""
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2):
        return strategy.full_parameters()
    return (
        (name, strategy.spread(name, param))
        for name, param in strategy.named_parameters()
    )


def buffers(trainer: Trainer) -> NamedTensors:
    """The buffers of the layers that this rank has."""
    model = trainer.parallel_model.model
    return [
        (name.replace(WRAPPED, ""), buffer) for name, buffer in model.named_buffers()
    ]
