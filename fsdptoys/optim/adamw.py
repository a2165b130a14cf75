"""AdamW (arXiv:1711.05101): settings, the choice of its implementation by device and state dtype,
bfloat16 states."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import above, between
from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.options import Effect, Stage, option

from . import low_bit_adamw
from .config import Implementation, OptimConfig
from .fused_adamw import FusedAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")

LARGEST_BFLOAT16_BETA = 1 - 2**-8
"""Neighbors in bfloat16 are up to 2**-7 of a number apart; a decay by less than half of that is
rounded back."""


class OptimStateDType(Enum):
    """dtype in which states are kept; the update computes in float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    """Half the bytes, rounded to nearest: 8 bits of each moment."""
    int8 = "int8"
    """A quarter: torchao's 8-bit codes, and a scale for up to 256 of them."""
    float8 = "float8"
    """A quarter: float8_e4m3fn, with such scales."""
    int4 = "int4"
    """An eighth: 4-bit codes, and a scale for up to 128 of them."""


@dataclass
class AdamWSettings(OptimConfig):
    """Settings of AdamW, by itself or for a part of the parameters."""

    takes_implementation: ClassVar[bool] = True

    beta1: float = option(
        0.9,
        between(0, 1, below=True),
        effect=Effect.training,
        acts=Stage.update,
        alias="adam_beta1",
    )
    """Decay of the mean of the gradients."""
    beta2: float = option(
        0.95,
        between(0, 1, below=True),
        effect=Effect.training,
        acts=Stage.update,
        alias="adam_beta2",
    )
    """Decay of the mean of their squares."""
    eps: float = option(
        1e-8,
        above(0, 1e6),
        effect=Effect.training,
        acts=Stage.update,
        alias="adam_epsilon adam_eps",
    )
    """Added to the root of the mean square."""

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Two moments in float32."""
        return (4, 4)

    def build_adamw(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct ``torch.optim.AdamW``; its fused form is :class:`FusedAdamW`."""
        is_fused = self.implementation is Implementation.fused
        return self._construct(FusedAdamW if is_fused else torch.optim.AdamW, params)

    def _construct(
        self, kind: type[torch.optim.AdamW], params: list[dict[str, Any]]
    ) -> torch.optim.AdamW:
        betas = (self.beta1, self.beta2)
        return kind(
            params,
            lr=self.lr,
            betas=betas,
            eps=self.eps,
            **self.implementation.arguments,
        )


@dataclass
class AdamWConfig(AdamWSettings):
    """AdamW (arXiv:1711.05101)."""

    name: ClassVar[str] = "adamw"

    state_dtype: OptimStateDType = option(
        OptimStateDType.float32, effect=Effect.format, acts=Stage.update
    )
    """dtype in which the two moments are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype is OptimStateDType.bfloat16:
            for name in ("beta1", "beta2"):
                if (value := getattr(self, name)) > LARGEST_BFLOAT16_BETA:
                    raise ConfigError(
                        f"optim.{name}={value} shrinks a moment by less than "
                        "optim.state_dtype=bfloat16 resolves, so that it would never fall; set "
                        f"optim.{name}=0.95 or optim.state_dtype=float32"
                    )

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Two moments; with low-bit states, of the parameters that keep float32."""
        return (2, 2) if self.state_dtype is OptimStateDType.bfloat16 else (4, 4)

    @property
    def low_bit_format(self) -> str | None:
        """Name of torchao's format."""
        return (
            self.state_dtype.value
            if self.state_dtype.value in low_bit_adamw.FORMATS
            else None
        )

    @property
    def updates_float32_copies(self) -> bool:
        """Whether states are bfloat16, which the update widens."""
        return self.state_dtype is OptimStateDType.bfloat16

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether a parameter's states are kept in 8 or 4 bits."""
        format = self.low_bit_format
        return (
            format is not None
            and low_bit_adamw.block_elements(format, shape) is not None
        )

    def state_bytes(
        self, shape: Sequence[int], elements: int, in_block: bool
    ) -> tuple[int, ...]:
        """Bytes of codes and scales for matrices, of moments for the rest."""
        if self.is_matrix(shape, in_block):
            return low_bit_adamw.state_bytes(self.state_dtype.value, shape, elements)
        return super().state_bytes(shape, elements, in_block)

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct AdamW with states of ``state_dtype``."""
        if self.low_bit_format is not None:
            for group in params:
                group["lr"] = self.lr
            return low_bit_adamw.LowBitAdamW(
                params,
                format=self.low_bit_format,
                betas=(self.beta1, self.beta2),
                eps=self.eps,
                compiles=self.implementation is not Implementation.for_loop,
                build_adamw=self.build_adamw,
            )
        return (
            self._construct(BFloat16AdamW, params)
            if self.updates_float32_copies
            else self.build_adamw(params)
        )


class BFloat16AdamW(FusedAdamW):
    """``torch.optim.AdamW`` with bfloat16 moments, for dense parameters, DTensors included.

    An update makes float32 copies of one parameter's moments, updates with them as PyTorch does,
    and rounds them to nearest. It takes 8 bytes of scratch per element of the largest parameter,
    and rounds alike on all layouts. Rounding to nearest drops changes below half the distance to
    the next number, so betas too close to 1 are refused (``LARGEST_BFLOAT16_BETA``).

    Not covered: parameters not in float32, AMSGrad, several parameters in one kernel, stochastic
    rounding (``memory.offload_state_dtype`` has it).
    """

    @property
    def skips_on_device(self) -> bool:
        """With the fused kernel of an accelerator: unchanged float32 copies round to the same
        moments."""
        return bool(self.param_groups[0]["fused"]) and super().skips_on_device

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            local = local_tensor(param)
            if not state:
                state["step"] = torch.zeros(
                    (), device=local.device if group["fused"] else "cpu"
                )
                state.update(
                    {
                        name: torch.zeros_like(param, dtype=torch.bfloat16)
                        for name in MOMENTS
                    }
                )
            stored = [local_tensor(state[name]) for name in MOMENTS]
            moments = [moment.float() for moment in stored]
            grad = local_tensor(param.grad)  # type: ignore[arg-type]
            self._run(
                group,
                [local],
                [grad],
                *([moment] for moment in moments),
                [state["step"]],
            )
            for moment, rounded in zip(moments, stored, strict=True):
                rounded.copy_(moment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's, which casts states to the parameters' dtype; here cast back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update(
                {
                    name: state[name].to(torch.bfloat16)
                    for name in MOMENTS
                    if name in state
                }
            )
