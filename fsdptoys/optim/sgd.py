"""Stochastic gradient descent: settings of ``torch.optim.SGD``."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fsdptoys.utils.bounds import between
from fsdptoys.utils.options import Effect, Stage, option

from .config import OptimConfig, check_nesterov


@dataclass
class SGDConfig(OptimConfig):
    """Stochastic gradient descent with momentum."""

    name: ClassVar[str] = "sgd"
    takes_implementation: ClassVar[bool] = True
    update_takes_scratch: ClassVar[bool] = False
    fused_takes_shards: ClassVar[bool] = False

    momentum: float = option(
        0.9, between(0, 1, below=True), effect=Effect.training, acts=Stage.update
    )
    """Decay of the running sum of gradients; 0 keeps none."""
    nesterov: bool = option(False, effect=Effect.training, acts=Stage.update)
    """Look ahead by one momentum step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nesterov(self.momentum, self.nesterov, fix=0.9)

    @property
    def state_widths(self) -> tuple[int, ...]:
        """The running sum in float32, if there is momentum."""
        return (4,) if self.momentum else ()

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.SGD``."""
        return torch.optim.SGD(
            params,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            **self.implementation.arguments,
        )
