"""The switches of ``configs/memory``, and checks among them."""

import re
from dataclasses import dataclass
from enum import Enum

import torch

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.options import Effect, Stage, check_options, option

from .activation_checkpointing import SAVED_OPERATORS, GradientCheckpointing


class GradientDType(Enum):
    """dtype in which the chunked loss sums the gradient of the head's weight."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.value)


class OffloadSchedule(Enum):
    """When optimizer states are copied between host and device, and parameters are updated."""

    auto = "auto"
    """``pipelined``."""
    serial = "serial"
    """In ``step``, one bucket after the other: load, update, store."""
    pipelined = "pipelined"
    """In ``step``, the loads and stores of neighboring buckets overlap with the update of one; then
    all is freed."""
    lazy = "lazy"
    """Each bucket just before the next forward needs its parameters: transfers hide behind compute,
    gradients stay."""


class OffloadStateDType(Enum):
    """dtypes of optimizer states in host memory."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    """Half the memory and traffic; rounded stochastically, so that small updates survive on
    average."""

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.value)


class CPUOffloadExecutor(Enum):
    """Executor of updates in host memory."""

    native = "native"
    """PyTorch's policy: float32 parameters travel, the optimizer runs after the backward."""
    overlapped = "overlapped"
    """Parameters travel in ``parallel.param_dtype``; worker threads update them while the device
    computes (FSDP2)."""


@dataclass
class MemoryConfig:
    """Switches that trade time for memory."""

    chunk_loss: bool = option(
        False,
        effect=Effect.rounding,
        alias="chunked_loss chunked_cross_entropy use_liger_kernel fused_linear_cross_entropy",
    )
    """Compute the loss and its gradients over chunks of tokens, without the full logits."""
    chunk_tokens: str = option(
        "auto", effect=Effect.rounding, needs="memory.chunk_loss"
    )
    """Tokens a chunk; ``auto`` chooses by the size of the vocabulary and the device."""
    chunk_grad_dtype: GradientDType = option(
        GradientDType.float32,
        effect=Effect.format,
        acts=Stage.gradient,
        needs="memory.chunk_loss",
    )
    """dtype in which the gradient of the head's weight is summed over chunks."""
    gradient_checkpointing: GradientCheckpointing = option(
        GradientCheckpointing.none,
        effect=Effect.none,
        alias=(
            "activation_checkpointing activation_checkpoint use_gradient_checkpointing "
            "grad_checkpointing ac recompute fsdp_activation_checkpointing recompute_activations "
            "recompute_granularity activation_checkpoint.mode"
        ),
    )
    """Recompute blocks' activations in the backward: ``full`` (or true), or all but some operators'
    (``selective``)."""
    checkpointing_start_index: int = option(
        0, at_least(0), effect=Effect.none, needs="memory.gradient_checkpointing"
    )
    """First checkpointed block; the ones before it keep their activations."""
    checkpointing_every: int = option(
        1, at_least(1, 10**6), effect=Effect.none, needs="memory.gradient_checkpointing"
    )
    """Checkpoint every N-th block, counted from the first; the others keep their activations."""
    checkpointing_save: list[str] = option(
        ["mm", "bmm", "attention", "grouped_mm"],
        effect=Effect.none,
        needs="memory.gradient_checkpointing=selective",
    )
    """``selective``: the operators whose results are kept, any of these; the rest is recomputed."""
    checkpointing_budget: float | None = option(
        None, between(0, 1), effect=Effect.rounding, needs="train.compile"
    )
    """Share of the activations, 0 to 1, that PyTorch's partitioner keeps under ``train.compile``;
    null for all."""
    activation_offload: bool = option(
        False, effect=Effect.none, needs="memory.gradient_checkpointing"
    )
    """Keep the saved tensors of checkpointed blocks in host memory; they return one block ahead of
    their use."""
    optimizer_offload: bool = option(
        False,
        effect=Effect.none,
        alias="offload_optimizer optim_offload cpu_optimizer_offload",
    )
    """Keep optimizer states in host memory and stream them through the device, bucket by bucket."""
    offload_schedule: OffloadSchedule = option(
        OffloadSchedule.auto, effect=Effect.none, needs="memory.optimizer_offload"
    )
    """When ``optimizer_offload`` copies states."""
    offload_fraction: float = option(
        1.0, between(0, 1), effect=Effect.none, needs="memory.optimizer_offload"
    )
    """Share of the optimizer states, by bytes, that ``optimizer_offload`` keeps in host memory."""
    offload_bucket_mib: int = option(
        256, at_least(1, 2**20), effect=Effect.none, needs="memory.optimizer_offload"
    )
    """Optimizer states copied at a time; a bucket holds at least one parameter."""
    offload_state_dtype: OffloadStateDType = option(
        OffloadStateDType.float32,
        effect=Effect.format,
        acts=Stage.update,
        needs="memory.optimizer_offload",
    )
    """dtype of the states that ``optimizer_offload`` keeps in host memory."""
    optimizer_in_backward: bool = option(False, effect=Effect.none)
    """Update each parameter as soon as its gradient is final, and free the gradient; excludes
    clipping."""
    cpu_offload: bool = option(
        False,
        effect=Effect.rounding,
        acts=Stage.update,
        alias="offload offload_params param_offload fsdp_cpu_offload fsdp_offload_params",
    )
    """Keep parameters, gradients and optimizer states in host memory and update them there."""
    cpu_offload_executor: CPUOffloadExecutor = option(
        CPUOffloadExecutor.native, effect=Effect.none, needs="memory.cpu_offload"
    )
    """Executor of ``cpu_offload``."""
    cpu_threads: int | None = option(
        None, at_least(1), effect=Effect.rounding, needs="memory.cpu_offload"
    )
    """Threads of a rank's optimizer under ``cpu_offload``; null for the node's cores over its
    ranks."""

    def __post_init__(self) -> None:
        if not re.fullmatch("auto|0*[1-9][0-9]{0,8}", self.chunk_tokens):
            raise ConfigError(
                f"memory.chunk_tokens={self.chunk_tokens} must be auto or a number of tokens "
                "from 1 to 999999999; set memory.chunk_tokens=auto"
            )
        check_options("memory", self)
        self._check_checkpointing()
        self._check_offload()

    @property
    def checkpoints(self) -> bool:
        """Whether any block is checkpointed."""
        return self.gradient_checkpointing is not GradientCheckpointing.none

    def _check_checkpointing(self) -> None:
        unknown = [
            name for name in self.checkpointing_save if name not in SAVED_OPERATORS
        ]
        if unknown:
            raise ConfigError(
                f"memory.checkpointing_save names {unknown[0]}, which is none of "
                f"{', '.join(SAVED_OPERATORS)}; set "
                f"memory.checkpointing_save=[{','.join(SAVED_OPERATORS)}]"
            )
        if self.checkpoints and self.checkpointing_budget is not None:
            raise ConfigError(
                f"memory.checkpointing_budget={self.checkpointing_budget} lets the compiler "
                "choose recomputations, which "
                f"memory.gradient_checkpointing={self.gradient_checkpointing.value} does "
                "already; set memory.gradient_checkpointing=none"
            )

    def _check_offload(self) -> None:
        if self.cpu_offload and self.optimizer_offload:
            raise ConfigError(
                "memory.cpu_offload=true and memory.optimizer_offload=true exclude each other, "
                "since CPU offload already keeps the optimizer states in host memory; set "
                "memory.optimizer_offload=false"
            )
        if self.optimizer_offload and self.offload_fraction == 0:
            raise ConfigError(
                f"memory.offload_fraction={self.offload_fraction} moves nothing; set "
                "memory.optimizer_offload=false or memory.offload_fraction=1"
            )
