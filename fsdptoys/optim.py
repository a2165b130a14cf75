"""Optimizers, their parameter groups, and learning-rate schedules, chosen by name: PyTorch's own, and Muon.

The schedule is a pure function of the step, so that a resumed run needs nothing but its step number.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .bfloat16_adamw import BFloat16AdamW
from .errors import ConfigError
from .muon import MATRICES, Muon, scale_of_original, scale_to_adamw
from .vector_adamw import VectorAdamW

MOST_NS_STEPS = 99
"""As many as ``torch.optim.Muon`` takes."""

LARGEST_BFLOAT16_BETA = 1 - 2**-8
"""Neighbours of bfloat16 are up to 2**-7 of a number apart: what shrinks by less than half of that is rounded back."""


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


class StateDType(Enum):
    """Number format in which states are kept; an update computes in float32 all the same."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    """Half the bytes, rounded to nearest: 8 bits of each mean."""


class ProductDType(Enum):
    """Number format of Newton-Schulz's products, and of the shards on their way to them."""

    auto = "auto"
    """bfloat16; float32 with ``train.deterministic=true``."""
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """PyTorch's name for it."""
        assert self is not ProductDType.auto, "it must have been resolved"
        return torch.float32 if self is ProductDType.float32 else torch.bfloat16


class UpdateScale(Enum):
    """How long an orthogonalised update is made."""

    match_adamw = "match_adamw"
    """``0.2 * sqrt(max(rows, columns))``: AdamW's usual root mean square, for AdamW's learning rates."""
    original = "original"
    """``sqrt(max(1, rows / columns))``, for learning rates of about 0.02."""


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
    def state_widths(self) -> tuple[int, ...]:
        """Bytes of each state for an element of a parameter."""

    @property
    def matrix_state_widths(self) -> tuple[int, ...]:
        """The same for an element of a block's matrices."""
        return self.state_widths

    @property
    def state_bytes(self) -> int:
        """Bytes of state for each element of a parameter that is no block's matrix."""
        return sum(self.state_widths)

    @abstractmethod
    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct the optimizer over parameter groups, whose ``MATRICES`` says whether they are blocks' matrices."""


@dataclass
class AdamWSettings(OptimConfig):
    """What AdamW has wherever it is used."""

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
    def state_widths(self) -> tuple[int, ...]:
        """Two means in float32."""
        return (4, 4)

    def build_adamw(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.AdamW``; its fused form on a CPU is :class:`VectorAdamW`."""
        on_cpu = all(param.device.type == "cpu" for group in params for param in group["params"])
        fused_on_cpu = on_cpu and self.implementation is Implementation.fused
        return self._construct(VectorAdamW if fused_on_cpu else torch.optim.AdamW, params)

    def _construct(self, kind: type[torch.optim.AdamW], params: list[dict[str, Any]]) -> torch.optim.AdamW:
        return kind(
            params, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, **_implementation(self.implementation)
        )


@dataclass
class AdamWConfig(AdamWSettings):
    """AdamW (arXiv:1711.05101)."""

    name: ClassVar[str] = "adamw"

    state_dtype: StateDType = StateDType.float32
    """Number format in which the two means are kept."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        super().__post_init__()
        if self.state_dtype is StateDType.bfloat16:
            for name in ("beta1", "beta2"):
                value = getattr(self, name)
                if value > LARGEST_BFLOAT16_BETA:
                    raise ConfigError(
                        f"optim.{name}={value} shrinks a mean by less than optim.state_dtype=bfloat16 can tell, so "
                        f"that it would never fall; set optim.{name}=0.95 or optim.state_dtype=float32"
                    )

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Two means."""
        return (4, 4) if self.state_dtype is StateDType.float32 else (2, 2)

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct AdamW, with states of the number format that is asked for."""
        if self.state_dtype is StateDType.bfloat16:
            return self._construct(BFloat16AdamW, params)
        return self.build_adamw(params)


@dataclass
class MuonConfig(AdamWSettings):
    """Muon for the blocks' matrices, AdamW for everything else (https://kellerjordan.github.io/posts/muon/)."""

    name: ClassVar[str] = "muon"

    momentum: float = 0.95
    """Decay of the mean of the matrices' gradients."""
    nesterov: bool = True
    """Look ahead by one momentum step."""
    ns_steps: int = 5
    """Rounds of Newton-Schulz."""
    ns_dtype: ProductDType = ProductDType.auto
    """Number format of its products."""
    update_scale: UpdateScale = UpdateScale.match_adamw
    """How long an orthogonalised update is made."""
    adamw_lr: float | None = None
    """Highest learning rate of AdamW's part; null for ``lr``."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.momentum={self.momentum} must be at least 0 and below 1; set optim.momentum=0.95")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true needs momentum; set optim.momentum=0.95 or optim.nesterov=false")
        if not 1 <= self.ns_steps <= MOST_NS_STEPS:
            raise ConfigError(
                f"optim.ns_steps={self.ns_steps} must be between 1 and {MOST_NS_STEPS}; set optim.ns_steps=5"
            )
        if self.adamw_lr is not None:
            _at_least_zero("adamw_lr", self.adamw_lr, fix=3e-4)

    @property
    def matrix_state_widths(self) -> tuple[int, ...]:
        """The momentum in float32."""
        return (4,)

    def resolve(self, deterministic: bool) -> None:
        """Choose the number format of the products."""
        if self.ns_dtype is ProductDType.auto:
            self.ns_dtype = ProductDType.float32 if deterministic else ProductDType.bfloat16

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct Muon, with AdamW in it."""
        for group in params:
            of_adamw = self.lr if self.adamw_lr is None else self.adamw_lr
            group["lr"] = self.lr if group[MATRICES] else of_adamw
        return Muon(
            params,
            momentum=self.momentum,
            nesterov=self.nesterov,
            steps=self.ns_steps,
            dtype=self.ns_dtype.torch,
            scale=scale_to_adamw if self.update_scale is UpdateScale.match_adamw else scale_of_original,
            build_adamw=self.build_adamw,
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
    def state_widths(self) -> tuple[int, ...]:
        """The running sum in float32, where there is momentum."""
        return (4,) if self.momentum else ()

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.SGD``."""
        return torch.optim.SGD(
            params, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, **_implementation(self.implementation)
        )


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    matrix_names: Collection[str],
    block_names: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Group the parameters by how they are updated and whether they decay, and construct the optimizer.

    Args:
        config: which optimizer, and how.
        named_parameters: parameters as a strategy left them, with the model's own names.
        matrix_names: names of the parameters that had two or more dims before anything sharded them.
        block_names: names of the parameters that are in blocks, not in embedding, head or last norm.
    """
    apart = isinstance(config, MuonConfig)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (is_matrix, decays): [] for is_matrix in (True, False) for decays in (True, False)
    }
    for name, param in named_parameters:
        decays = config.weight_decay_on is WeightDecayOn.all or name in matrix_names
        is_matrix = apart and name in matrix_names and name in block_names
        groups[is_matrix, decays].append(param)
    return config.build(
        [
            {"params": params, "weight_decay": config.weight_decay if decays else 0.0}
            | ({MATRICES: is_matrix} if apart else {})
            for (is_matrix, decays), params in groups.items()
            if params
        ]
    )


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
