"""Optimizers, their parameter groups, and learning-rate schedules: PyTorch's own, chosen by name.

The schedule is a pure function of the step, so that a resumed run needs nothing but its step number.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .errors import ConfigError
from .vector_adamw import VectorAdamW


class Schedule(Enum):
    """Course of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    """Half a cosine from ``lr`` to ``lr * min_lr_ratio``."""
    wsd = "wsd"
    """Warm-up, stable, decay: constant, then linear over the last ``decay_share`` of the steps (arXiv:2404.06395)."""


class Implementation(Enum):
    """How the update runs over the parameters."""

    auto = "auto"
    """What PyTorch chooses."""
    fused = "fused"
    foreach = "foreach"
    for_loop = "for_loop"


class WeightDecayOn(Enum):
    """Which parameters decay."""

    matrices = "matrices"
    """Parameters of two or more dims: not norms, not biases."""
    all = "all"


@dataclass
class OptimConfig(ABC):
    """What every optimizer has."""

    name: ClassVar[str]
    """The word after ``optim=``."""

    lr: float = 3e-4
    """Highest learning rate."""
    weight_decay: float = 0.1
    """Decoupled for AdamW, added to the gradient for SGD."""
    weight_decay_on: WeightDecayOn = WeightDecayOn.matrices
    """Which parameters decay."""
    implementation: Implementation = Implementation.auto
    """How the update runs over the parameters."""
    schedule: Schedule = Schedule.cosine
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to ``lr``; a run of fewer steps does not get there."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a share of ``lr``; for ``cosine`` and ``wsd``."""
    decay_share: float = 0.2
    """Share of the steps in which ``wsd`` decays."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        _at_least_zero("lr", self.lr, fix=3e-4)
        _at_least_zero("weight_decay", self.weight_decay)
        _at_least_zero("warmup_steps", self.warmup_steps)
        for name in ("min_lr_ratio", "decay_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"optim.{name}={value} must be between 0 and 1; set optim.{name}=0.1")

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of state for each element of a parameter."""

    @abstractmethod
    def build(self, params: list[dict[str, object]]) -> torch.optim.Optimizer:
        """Construct the optimizer over parameter groups."""


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW (arXiv:1711.05101)."""

    name: ClassVar[str] = "adamw"

    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the root of the mean square."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"optim.{name}={value} must be at least 0 and below 1; set optim.{name}=0.9")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ConfigError(f"optim.eps={self.eps} must be a finite number above 0; set optim.eps=1e-08")

    @property
    def state_bytes(self) -> int:
        """Two means in float32."""
        return 8

    def build(self, params: list[dict[str, object]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.AdamW``; its fused form on a CPU is :class:`VectorAdamW`."""
        on_cpu = all(param.device.type == "cpu" for group in params for param in group["params"])  # type: ignore[attr-defined]
        kind = VectorAdamW if on_cpu and self.implementation is Implementation.fused else torch.optim.AdamW
        return kind(
            params, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, **_implementation(self.implementation)
        )


@dataclass
class SGDConfig(OptimConfig):
    """Stochastic gradient descent with momentum."""

    name: ClassVar[str] = "sgd"

    momentum: float = 0.9
    """Decay of the running sum of gradients; 0 keeps none."""
    nesterov: bool = False
    """Look ahead by one momentum step."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.momentum={self.momentum} must be at least 0 and below 1; set optim.momentum=0.9")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true needs momentum; set optim.momentum=0.9 or optim.nesterov=false")

    @property
    def state_bytes(self) -> int:
        """The running sum in float32, where there is momentum."""
        return 4 if self.momentum else 0

    def build(self, params: list[dict[str, object]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.SGD``."""
        return torch.optim.SGD(
            params, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, **_implementation(self.implementation)
        )


def build_optimizer(
    config: OptimConfig, named_parameters: Iterable[tuple[str, nn.Parameter]], matrix_names: set[str]
) -> torch.optim.Optimizer:
    """Group the parameters by whether they decay and construct the optimizer.

    Args:
        config: which optimizer, and how.
        named_parameters: parameters as a strategy left them, with the model's own names.
        matrix_names: names of the parameters that had two or more dims before anything sharded them.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in named_parameters:
        decays = config.weight_decay_on is WeightDecayOn.all or name in matrix_names
        (decaying if decays else others).append(param)
    groups: list[dict[str, object]] = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return config.build([group for group in groups if group["params"]])


def learning_rate_ratio(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of the step numbered ``step`` (from 0) of ``steps``, as a share of ``config.lr``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule is Schedule.constant:
        return 1.0
    after_warmup = max(1, steps - config.warmup_steps - 1)
    progress = min(1.0, (step - config.warmup_steps) / after_warmup)
    if config.schedule is Schedule.cosine:
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    decayed = max(0.0, progress - (1 - config.decay_share)) / config.decay_share if config.decay_share else 0.0
    return 1 - (1 - config.min_lr_ratio) * decayed


def build_schedule(config: OptimConfig, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Construct PyTorch's scheduler over :func:`learning_rate_ratio`."""
    return LambdaLR(optimizer, lambda step: learning_rate_ratio(config, step, steps))


def set_schedule(schedule: LambdaLR, step: int) -> None:
    """Put a schedule where it is after ``step`` steps, learning rates included."""
    rates = [base * ratio(step) for base, ratio in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates})


def _implementation(implementation: Implementation) -> dict[str, bool]:
    return {
        Implementation.auto: {},
        Implementation.fused: {"fused": True},
        Implementation.foreach: {"foreach": True},
        Implementation.for_loop: {"foreach": False, "fused": False},
    }[implementation]


def _at_least_zero(name: str, value: float, fix: float = 0) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"optim.{name}={value} must be a finite number of at least 0; set optim.{name}={fix}")
