"""Check the optimizer against strategy, offload and device before the launch."""

from typing import NoReturn, Protocol

import torch

from fsdptoys.errors import ConfigError
from fsdptoys.memory import CPUOffloadExecutor, MemoryConfig
from fsdptoys.models import ModelConfig, MoEConfig
from fsdptoys.optim import Implementation, OptimConfig, WeightDecayOn, low_bit_adamw
from fsdptoys.optim.loss_scale import LossScaleConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.fsdp2 import sharding
from fsdptoys.parallel.mesh import Axes, MeshConfig
from fsdptoys.utils.torchao import torchao_fault


class Loop(Protocol):
    """Settings of the training loop that affect these checks."""

    grad_accum: int
    max_grad_norm: float | None
    skip_nonfinite: bool
    deterministic: Deterministic


def check_optimizer(
    optim: OptimConfig, parallel: ParallelConfig, memory: MemoryConfig, train: Loop, device_type: str
) -> None:
    """Resolve every ``auto``, and check the optimizer against strategy, offload and device, or raise a ConfigError."""
    deterministic = train.deterministic
    reduces_each = deterministic and not deterministic.covers_layouts
    if parallel.flattens_parameters and memory.cpu_offload and reduces_each and train.grad_accum > 1:
        # Each reduction would overwrite the offloaded gradient of the previous one.
        raise ConfigError(
            f"train.grad_accum={train.grad_accum} with train.deterministic=true reduces after every "
            "micro-batch, which FSDP1 cannot add up under memory.cpu_offload=true; set parallel=fsdp2"
        )
    _check_states(optim, parallel, memory, deterministic)
    if optim.exchanges_matrices:
        _check_matrices(optim, parallel, memory)
    optim.resolve(bool(deterministic))
    on_cpu = device_type == "cpu" or memory.cpu_offload
    # In deterministic mode, offload must give the same bits as the accelerator, which the fused CPU step does not.
    may_fuse = device_type == "cpu" or ((memory.cpu_offload or device_type == "cuda") and not deterministic)
    if optim.implementation is Implementation.auto and may_fuse and optim.fused_takes_shards:
        # PyTorch's default makes several times as many passes, and on CUDA allocates scratch.
        optim.implementation = Implementation.fused
    if optim.implementation is Implementation.fused and not optim.fused_takes_shards:
        if parallel.uses_dtensor:
            raise ConfigError(
                f"optim.implementation=fused has no {optim.name.upper()} for FSDP2's sharded parameters; set "
                "optim.implementation=foreach"
            )
        if deterministic and on_cpu:
            raise ConfigError(
                f"optim.implementation=fused has {optim.name.upper()} round by a shard's size on a CPU, which "
                f"train.deterministic={deterministic.word} rules out; set optim.implementation=auto"
            )
    if not parallel.keeps_parameters and optim.weight_decay > 0 and optim.weight_decay_on is WeightDecayOn.matrices:
        raise ConfigError(
            "optim.weight_decay_on=matrices cannot select parameters under parallel.use_orig_params=false; "
            "set optim.weight_decay_on=all or parallel.use_orig_params=true"
        )


def _check_states(
    optim: OptimConfig, parallel: ParallelConfig, memory: MemoryConfig, deterministic: Deterministic
) -> None:
    if optim.low_bit_format is None and not optim.updates_float32_copies:
        return
    setting = f"optim.state_dtype={optim.low_bit_format or 'bfloat16'}"
    if memory.optimizer_offload:
        raise ConfigError(
            f"{setting} is of states that stay where they are, which memory.optimizer_offload=true "
            "moves; set memory.offload_state_dtype=bfloat16 and optim.state_dtype=float32"
        )
    if memory.cpu_offload and memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
        raise ConfigError(
            f"{setting} is not an option of memory.cpu_offload_executor=overlapped; set "
            "memory.cpu_offload_executor=native or optim.state_dtype=float32"
        )
    if optim.low_bit_format is not None:
        _check_low_bits(optim, setting, parallel, deterministic)


def _check_low_bits(optim: OptimConfig, setting: str, parallel: ParallelConfig, deterministic: Deterministic) -> None:
    """Check that shards keep full rows, and that torchao can update them."""
    if parallel.matrices_lost:
        raise ConfigError(
            f"{setting} keeps a scale for each part of a row of a matrix, which parallel={parallel.name} "
            f"{parallel.matrices_lost}; set parallel=fsdp2 or optim.state_dtype=bfloat16"
        )
    fault = torchao_fault()
    if fault is not None:
        raise ConfigError(f"{setting} needs the package torchao, which {fault}, or set optim.state_dtype=bfloat16")
    if optim.implementation is Implementation.foreach:
        raise ConfigError(
            f"optim.implementation=foreach is not an option of {setting}; set optim.implementation=fused, which "
            "compiles the update, or optim.implementation=for_loop"
        )
    if deterministic and optim.implementation is Implementation.fused:
        raise ConfigError(
            f"optim.implementation=fused compiles updates for each size with {setting}, and rounds by it, which "
            f"train.deterministic={deterministic.word} rules out; set optim.implementation=auto"
        )
    if optim.implementation is Implementation.auto:
        optim.implementation = Implementation.for_loop if deterministic else Implementation.fused


def check_loss_scale(scale: LossScaleConfig, parallel: ParallelConfig, memory: MemoryConfig, train: Loop) -> None:
    """Check the loss scale of float16 against the optimizer's steps, and that other dtypes set none."""
    dtype = parallel.param_dtype
    if not dtype.needs_loss_scale:
        scale.check_used(dtype.value)
    elif memory.optimizer_in_backward:
        raise ConfigError(
            f"memory.optimizer_in_backward=true updates before it is known whether a gradient of "
            f"parallel.param_dtype={dtype.value} overflowed, which skips the step; set "
            "memory.optimizer_in_backward=false or parallel.param_dtype=bfloat16"
        )
    elif not train.skip_nonfinite:
        raise ConfigError(
            f"train.skip_nonfinite=false would update with overflowed gradients, from which "
            f"parallel.param_dtype={dtype.value} finds its loss scale; set train.skip_nonfinite=true or "
            "parallel.param_dtype=bfloat16"
        )


def check_blocks(optim: OptimConfig, model: ModelConfig, mesh: MeshConfig, axes: Axes) -> None:
    """Refuse shards that end within a quantization block, as is possible for stacks of experts."""
    if optim.low_bit_format is None or not isinstance(model, MoEConfig):
        return
    with torch.device("meta"):
        parameters = list(model.build().named_parameters())
    for name, param in parameters:
        block, (dim, ranks) = low_bit_adamw.block_elements(optim.low_bit_format, param.shape), sharding(param, axes)
        cut = param.shape[-1] // ranks if dim == param.ndim - 1 else 0
        if block is not None and cut % block:
            fix = "optim.state_dtype=bfloat16"
            if axes.ep == 1:
                fix = f"a mesh.fsdp_size that divides {param.shape[0]} or {fix}"
            elif model.n_experts % axes.copy == 0:
                fix = f"mesh.ep_size={axes.copy} or {fix}"
            raise ConfigError(
                f"optim.state_dtype={optim.low_bit_format} keeps a scale for {block} numbers of a row, and "
                f"mesh.fsdp_size={mesh.fsdp_size} cuts rows of {name} into {cut}; set {fix}"
            )


def check_in_backward(
    optim: OptimConfig, parallel: ParallelConfig, memory: MemoryConfig, train: Loop, mesh: MeshConfig, world_size: int
) -> None:
    """Refuse optimizer steps in the backward if gradients are needed afterwards."""
    if not memory.optimizer_in_backward:
        return

    def refuse(reason: str) -> NoReturn:
        raise ConfigError(f"memory.optimizer_in_backward=true {reason} or memory.optimizer_in_backward=false")

    if parallel.gradients_held:
        held = f"parallel={parallel.name} {parallel.gradients_held}"
        refuse(f"frees gradients as they come, and {held}; set parallel=fsdp2")
    if parallel.shards_parameters and mesh.shard_ranks(world_size) < mesh.stage_ranks(world_size):
        refuse(
            f"saves nothing with mesh.fsdp_size={mesh.fsdp_size}, since FSDP2 holds gradients that go to replicas "
            "until the backward ends; set mesh.fsdp_size=-1"
        )
    if optim.exchanges_matrices:
        refuse(f"updates parameter by parameter, and optim={optim.name} exchanges several at a time; set optim=adamw")
    for name in ("optimizer_offload", "cpu_offload"):
        if getattr(memory, name):
            offload = f"memory.{name}"
            refuse(f"updates on the device in the backward, {offload}=true elsewhere or later; set {offload}=false")
    if train.grad_accum > 1:
        refuse(f"leaves no gradients to add to, as train.grad_accum={train.grad_accum} needs; set train.grad_accum=1")
    if train.max_grad_norm is not None:
        refuse(
            "updates before the norm of all gradients is known, by which "
            f"train.max_grad_norm={train.max_grad_norm} scales them; set train.max_grad_norm=null"
        )
    if train.skip_nonfinite:
        refuse(
            "updates before it is known whether all gradients are finite, for which train.skip_nonfinite=true waits; "
            "set train.skip_nonfinite=false"
        )


def _check_matrices(optim: OptimConfig, parallel: ParallelConfig, memory: MemoryConfig) -> None:
    """Check that matrices are on the device, unsharded or sharded along one dim."""
    if parallel.matrices_lost:
        raise ConfigError(
            f"optim={optim.name} orthogonalizes full matrices, which parallel={parallel.name} "
            f"{parallel.matrices_lost}; set parallel=fsdp2 or optim=adamw"
        )
    for name in ("optimizer_offload", "cpu_offload"):
        if getattr(memory, name):
            raise ConfigError(
                f"memory.{name}=true is not an option of optim={optim.name}, whose update needs full matrices on the "
                f"device; set memory.{name}=false or optim=adamw"
            )
