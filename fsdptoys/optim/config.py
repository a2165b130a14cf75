"""Optimizers and their parameter groups, chosen by name: PyTorch's own, with states of fewer bits too, and Muon."""

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

from . import low_bit_adamw
from .bfloat16_adamw import BFloat16AdamW
from .matrix_optimizer import MATRICES
from .muon import Muon, scale_of_original, scale_to_adamw
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
    """One kernel; with states of 8 or 4 bits, those that the compiler makes."""
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
    int8 = "int8"
    """A quarter: torchao's codes of 8 bits, and a scale for up to 256 of them."""
    float8 = "float8"
    """A quarter: float8_e4m3fn, with such scales."""
    int4 = "int4"
    """An eighth: codes of 4 bits, and a scale for up to 128 of them."""

    @property
    def is_low_bit(self) -> bool:
        """Whether states are torchao's."""
        return self.value in low_bit_adamw.FORMATS


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
    exchanges_matrices: ClassVar[bool] = False
    """Whether ranks exchange shards so that each matrix is updated whole by one of them."""
    update_takes_scratch: ClassVar[bool] = True
    """Whether the unfused update allocates temporaries of the parameters' size."""

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
        check_at_most("optim", self, lr=1e6, weight_decay=1e6, warmup_steps=MOST_STEPS)
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
    def keeps_states(self) -> bool:
        """Whether there are any."""
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
        """Whether a parameter of this shape, in a block or outside of all, is updated as a matrix of its own kind."""
        return False

    def state_bytes(self, shape: Sequence[int], elements: int, in_block: bool) -> tuple[int, ...]:
        """Bytes of each state of so many elements of a parameter of this shape."""
        return tuple(width * elements for width in self.state_widths)

    @abstractmethod
    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct the optimizer over parameter groups, whose ``MATRICES`` says whether ``is_matrix`` holds."""


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
        check_at_most("optim", self, eps=1e6)
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
        """Two means; of what is kept in fewer bits, the rest."""
        return (2, 2) if self.state_dtype is StateDType.bfloat16 else (4, 4)

    @property
    def low_bit_format(self) -> str | None:
        """Name of torchao's format."""
        return self.state_dtype.value if self.state_dtype.is_low_bit else None

    @property
    def updates_float32_copies(self) -> bool:
        """bfloat16 states are widened for the update."""
        return self.state_dtype is StateDType.bfloat16

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether its states are kept in few bits."""
        kept = self.low_bit_format
        return kept is not None and low_bit_adamw.block_elements(kept, shape) is not None

    def state_bytes(self, shape: Sequence[int], elements: int, in_block: bool) -> tuple[int, ...]:
        """Those of codes and scales for matrices."""
        if self.is_matrix(shape, in_block):
            return low_bit_adamw.state_bytes(self.state_dtype.value, shape, elements)
        return super().state_bytes(shape, elements, in_block)

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct AdamW, with states of the number format that is asked for."""
        if self.state_dtype is StateDType.bfloat16:
            return self._construct(BFloat16AdamW, params)
        if self.state_dtype.is_low_bit:
            for group in params:
                group["lr"] = self.lr
            return low_bit_adamw.LowBitAdamW(
                params,
                format=self.state_dtype.value,
                betas=(self.beta1, self.beta2),
                eps=self.eps,
                compiles=self.implementation is not Implementation.for_loop,
                build_adamw=self.build_adamw,
            )
        return self.build_adamw(params)


@dataclass
class MuonConfig(AdamWSettings):
    """Muon for the blocks' matrices, AdamW for everything else (https://kellerjordan.github.io/posts/muon/)."""

    name: ClassVar[str] = "muon"
    exchanges_matrices: ClassVar[bool] = True

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
        check_at_most("optim", self, adamw_lr=1e6)
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

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether it is orthogonalised."""
        return in_block and len(shape) >= 2

    def state_bytes(self, shape: Sequence[int], elements: int, in_block: bool) -> tuple[int, ...]:
        """The momentum in float32 for matrices."""
        return (4 * elements,) if self.is_matrix(shape, in_block) else super().state_bytes(shape, elements, in_block)

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
    update_takes_scratch: ClassVar[bool] = False

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
