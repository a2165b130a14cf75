"""Settings that all optimizers share, and their construction over parameter groups."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_STEPS, check_at_most

from .matrix_optimizer import MATRICES


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
    """PyTorch's choice."""
    fused = "fused"
    """One kernel; with states of 8 or 4 bits, compiled kernels."""
    foreach = "foreach"
    for_loop = "for_loop"

    @property
    def arguments(self) -> dict[str, bool]:
        """Arguments of a PyTorch optimizer."""
        return {
            Implementation.auto: {},
            Implementation.fused: {"fused": True},
            Implementation.foreach: {"foreach": True},
            Implementation.for_loop: {"foreach": False, "fused": False},
        }[self]


class WeightDecayOn(Enum):
    """Which parameters decay."""

    matrices = "matrices"
    """Parameters of two or more dims: not norms, not biases."""
    all = "all"


@dataclass
class OptimConfig(ABC):
    """Settings of every optimizer, and the facts about it that other packages ask for."""

    name: ClassVar[str]
    """The word after ``optim=``."""
    exchanges_matrices: ClassVar[bool] = False
    """Whether ranks exchange shards so that each matrix is updated whole by one of them."""
    update_takes_scratch: ClassVar[bool] = True
    """Whether the unfused update allocates temporaries of the parameters' size."""
    fused_takes_shards: ClassVar[bool] = True
    """Whether the fused update takes DTensors and, on a CPU, gives bits that do not depend on a shard's size."""

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
        check_at_most("optim", self, lr=1e6, weight_decay=1e6, warmup_steps=MOST_STEPS)
        check_at_least_zero("lr", self.lr, fix=3e-4)
        check_at_least_zero("weight_decay", self.weight_decay)
        check_at_least_zero("warmup_steps", self.warmup_steps)
        for name in ("min_lr_ratio", "decay_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"optim.{name}={value} must be between 0 and 1; set optim.{name}=0.1")

    def resolve(self, deterministic: bool) -> None:  # noqa: B027 (not every optimizer has such settings)
        """Replace every ``auto`` of the optimizer's own settings by its value."""

    @property
    @abstractmethod
    def state_widths(self) -> tuple[int, ...]:
        """Bytes of each state per element of a parameter."""

    @property
    def keeps_states(self) -> bool:
        """Whether the optimizer has states."""
        return bool(self.state_widths)

    @property
    def low_bit_format(self) -> str | None:
        """Format of matrices' states in 8 or 4 bits; None for wider states."""
        return None

    @property
    def updates_float32_copies(self) -> bool:
        """Whether the update computes on float32 copies of the states, one parameter at a time."""
        return False

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether a parameter of this shape, in a block or outside, gets the optimizer's own update for matrices."""
        return False

    def state_bytes(self, shape: Sequence[int], elements: int, in_block: bool) -> tuple[int, ...]:
        """Bytes of each state for a number of elements of a parameter of this shape."""
        return tuple(width * elements for width in self.state_widths)

    @abstractmethod
    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct the optimizer over parameter groups; their ``MATRICES`` is the value of ``is_matrix``."""


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    matrix_names: Collection[str],
    block_names: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Group the parameters by update and weight decay, and construct the optimizer.

    Args:
        config: settings.
        named_parameters: parameters after sharding, with the model's own names.
        matrix_names: names of the parameters that had two or more dims before sharding.
        block_names: names of the parameters in blocks, not in embedding, head or last norm.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (is_matrix, decays): [] for is_matrix in (True, False) for decays in (True, False)
    }
    for name, param in named_parameters:
        decays = config.weight_decay_on is WeightDecayOn.all or name in matrix_names
        groups[config.is_matrix(param.shape, name in block_names), decays].append(param)
    return config.build(
        [
            {"params": params, "weight_decay": config.weight_decay if decays else 0.0, MATRICES: is_matrix}
            for (is_matrix, decays), params in groups.items()
            if params
        ]
    )


def check_at_least_zero(name: str, value: float, fix: float = 0) -> None:
    """Refuse negative and non-finite numbers.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"optim.{name}={value} must be a finite number of at least 0; set optim.{name}={fix}")


def check_momentum(momentum: float, nesterov: bool, fix: float) -> None:
    """Check a momentum, and that Nesterov's method has one.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if not 0 <= momentum < 1:
        raise ConfigError(f"optim.momentum={momentum} must be at least 0 and below 1; set optim.momentum={fix}")
    if nesterov and momentum == 0:
        raise ConfigError(f"optim.nesterov=true needs momentum; set optim.momentum={fix} or optim.nesterov=false")
