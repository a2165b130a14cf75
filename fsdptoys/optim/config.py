"""Settings that all optimizers share, their construction over parameter groups, and the
learning-rate schedules.

Schedules are pure functions of the step, so a resumed run needs only its step number.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_STEPS, at_least, between
from fsdptoys.utils.options import Effect, Stage, check_options, option

from .matrix_optimizer import MATRICES


class Schedule(Enum):
    """Course of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    """Half a cosine from ``lr`` to ``lr * min_lr_ratio``."""
    wsd = "wsd"
    """Warm-up, stable, decay: constant, then linear over the last ``decay_share`` of the steps
    (arXiv:2404.06395)."""


class Implementation(Enum):
    """How the update runs over the parameters."""

    auto = "auto"
    """``fused`` AdamW on a CPU, and on CUDA unless ``train.deterministic=true``; otherwise
    PyTorch's choice."""
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
    takes_implementation: ClassVar[bool] = False
    """Whether ``build`` reads ``implementation``."""
    fused_takes_shards: ClassVar[bool] = True
    """Whether the fused update takes DTensors and, on a CPU, gives bits that do not depend on a
    shard's size."""

    lr: float = option(
        3e-4,
        at_least(0, 1e6),
        effect=Effect.training,
        acts=Stage.update,
        alias="learning_rate max_lr peak_lr base_lr",
    )
    """Highest learning rate."""
    weight_decay: float = option(
        0.1, at_least(0, 1e6), effect=Effect.training, acts=Stage.update
    )
    """Decoupled for AdamW, added to the gradient for SGD."""
    weight_decay_on: WeightDecayOn = option(
        WeightDecayOn.matrices, effect=Effect.training, acts=Stage.update
    )
    """Which parameters decay."""
    implementation: Implementation = option(
        Implementation.auto, effect=Effect.rounding, acts=Stage.update
    )
    """How the update runs over the parameters."""
    schedule: Schedule = option(
        Schedule.cosine,
        effect=Effect.training,
        acts=Stage.update,
        alias="lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    )
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = option(
        0,
        at_least(0, MOST_STEPS),
        effect=Effect.training,
        acts=Stage.update,
        alias="warmup num_warmup_steps lr_warmup_steps warmup_iters",
    )
    """Steps over which the learning rate rises linearly to ``lr``; a run of fewer steps does not
    get there."""
    min_lr_ratio: float = option(
        0.1, between(0, 1), effect=Effect.training, acts=Stage.update
    )
    """Last learning rate as a share of ``lr``; for ``cosine`` and ``wsd``."""
    decay_share: float = option(
        0.2, between(0, 1), effect=Effect.training, acts=Stage.update
    )
    """Share of the steps in which ``wsd`` decays."""

    def __post_init__(self) -> None:
        check_options("optim", self)
        if (
            self.implementation is not Implementation.auto
            and not self.takes_implementation
        ):
            raise ConfigError(
                f"optim.implementation={self.implementation.value} is not an option of "
                f"optim={self.name}, which has one; set optim.implementation=auto"
            )

    def resolve(self, device_type: str, *, deterministic: bool, on_host: bool) -> None:
        """Replace every ``auto`` by its value.

        The fused update makes a fraction of the passes of PyTorch's default, which on CUDA
        allocates scratch memory. In deterministic modes an update ``on_host`` must give the
        accelerator's bits, which the fused one does not.
        """
        if (
            self.implementation is not Implementation.auto
            or not self.takes_implementation
        ):
            return
        may_fuse = device_type == "cpu" or (
            (on_host or device_type == "cuda") and not deterministic
        )
        if self.low_bit_format is not None:
            self.implementation = (
                Implementation.for_loop if deterministic else Implementation.fused
            )
        elif may_fuse and self.fused_takes_shards:
            self.implementation = Implementation.fused

    @property
    @abstractmethod
    def state_widths(self) -> tuple[int, ...]:
        """Bytes of each state per element of a parameter; none for an optimizer without states."""

    @property
    def low_bit_format(self) -> str | None:
        """Format of matrices' states in 8 or 4 bits; None for wider states."""
        return None

    @property
    def updates_float32_copies(self) -> bool:
        """Whether the update computes on float32 copies of the states, one parameter at a time."""
        return False

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether a parameter of this shape, in a block or outside, gets the optimizer's own update
        for matrices."""
        return False

    def state_bytes(
        self, shape: Sequence[int], elements: int, in_block: bool
    ) -> tuple[int, ...]:
        """Bytes of each state for a number of elements of a parameter of this shape."""
        return tuple(width * elements for width in self.state_widths)

    @abstractmethod
    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct the optimizer over parameter groups; their ``MATRICES`` is the value of
        ``is_matrix``."""


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    matrix_names: Collection[str],
    block_names: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Group the parameters by update and weight decay, and construct the optimizer.

    Args:
        named_parameters: parameters after sharding, with the model's own names.
        matrix_names: names of the parameters that had two or more dims before sharding.
        block_names: names of the parameters in blocks, not in embedding, head or last norm.
    """
    # whether matrices, whether decaying
    kinds = itertools.product((True, False), repeat=2)
    groups: dict[tuple[bool, ...], list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, param in named_parameters:
        decays = config.weight_decay_on is WeightDecayOn.all or name in matrix_names
        groups[config.is_matrix(param.shape, name in block_names), decays].append(param)
    return config.build(
        [
            {
                "params": params,
                "weight_decay": config.weight_decay if decays else 0.0,
                MATRICES: is_matrix,
            }
            for (is_matrix, decays), params in groups.items()
            if params
        ]
    )


def check_nesterov(momentum: float, nesterov: bool, fix: float) -> None:
    """Raise a ConfigError for Nesterov's method without a momentum."""
    if nesterov and momentum == 0:
        raise ConfigError(
            f"optim.nesterov=true needs momentum; set optim.momentum={fix} or optim.nesterov=false"
        )


def learning_rate_ratio(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of the step numbered ``step`` (from 0) of ``steps``, as a share of
    ``config.lr``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule is Schedule.constant:
        return 1.0
    after_warmup = max(1, steps - config.warmup_steps - 1)
    progress = min(1.0, (step - config.warmup_steps) / after_warmup)
    if config.schedule is Schedule.cosine:
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )
    decayed = (
        max(0.0, progress - (1 - config.decay_share)) / config.decay_share
        if config.decay_share
        else 0.0
    )
    return 1 - (1 - config.min_lr_ratio) * decayed


def build_schedule(
    config: OptimConfig, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR:
    """Construct PyTorch's scheduler over :func:`learning_rate_ratio`."""
    return LambdaLR(optimizer, lambda step: learning_rate_ratio(config, step, steps))


def set_schedule(schedule: LambdaLR, step: int) -> None:
    """Set a schedule, and the learning rates, to the state after ``step`` steps."""
    rates = [
        base * ratio(step)
        for base, ratio in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(
        schedule.state_dict()
        | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    )
