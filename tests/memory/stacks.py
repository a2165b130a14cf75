"""Stacks of layers with offloaded optimizer states, a bucket a layer."""

from typing import Any

import torch
from torch import Tensor, nn

from fsdptoys.device import Device
from fsdptoys.memory import MemoryConfig
from fsdptoys.memory.bucketed_optimizer import BucketedOptimizer
from fsdptoys.memory.config import OffloadSchedule
from fsdptoys.memory.optimizer_offload import offload_optimizer
from fsdptoys.memory.transfers import Transfers

SERIAL = "serial"
PIPELINED = "pipelined"
LAZY = "lazy"


class Stack(nn.Module):
    """Layers called in order by a forward."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        """A chain of residual layers."""
        for layer in self.layers:
            hidden = layer(hidden).relu() + hidden
        return hidden


def offload_stack(
    model: Stack,
    how: str,
    transfers: Transfers | None = None,
    plain: torch.optim.Optimizer | None = None,
    **memory: Any,
) -> BucketedOptimizer:
    """AdamW, or another optimizer, over a stack, with a bucket a layer."""
    return offload_optimizer(
        plain or torch.optim.AdamW(model.parameters(), lr=1e-2),
        [(layer, list(layer.parameters())) for layer in model.layers],
        MemoryConfig(optimizer_offload=True, **memory),
        device=Device("cpu"),
        model=model,
        schedule=OffloadSchedule(how),
        seed=0,
        rank=0,
        transfers=transfers,
    )


def train_stack(
    model: Stack, optimizer: torch.optim.Optimizer, steps: int
) -> list[Tensor]:
    """Train on random numbers; return all parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, BucketedOptimizer):
        optimizer.flush()
    return [param.detach().clone() for param in model.parameters()]
