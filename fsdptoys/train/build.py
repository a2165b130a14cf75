"""Apply memory options and compilation to the blocks before sharding, and choose how the optimizer steps."""

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.memory import (
    ActivationOffload,
    BucketedUpdates,
    CPUOffloadExecutor,
    OptimizerInBackward,
    Updates,
    checkpoint_blocks,
    offload_optimizer,
    overlap_cpu_offload,
)
from fsdptoys.models import DecoderModel
from fsdptoys.parallel import Strategy
from fsdptoys.utils.dtensor import local_tensor

from .compile import compile_blocks


def prepare_blocks(model: DecoderModel, config: Config, device: Device) -> None:
    """Apply activation checkpointing, then compilation, to the blocks before anything wraps them."""
    memory = config.memory
    checkpoint_blocks(
        model.layers,
        memory.gradient_checkpointing,
        start_index=memory.checkpointing_start_index,
        every=memory.checkpointing_every,
        save=memory.checkpointing_save,
        offload=ActivationOffload(device.torch_device) if memory.activation_offload else None,
    )
    if config.train.compile:
        inner_hooks = config.parallel.hooks_parts_of_blocks(config.model)
        compile_blocks(model.layers, memory.checkpointing_budget, inner_hooks=inner_hooks)


def build_updates(optimizer: torch.optim.Optimizer, strategy: Strategy, config: Config, cpu_threads: int) -> Updates:
    """Choose where and when the optimizer, made after ``parallelize``, steps; ``cpu_threads`` are for host memory."""
    memory, context = config.memory, strategy.context
    if memory.optimizer_offload:
        assert config.train.init_seed is not None
        return BucketedUpdates(
            offload_optimizer(
                optimizer,
                strategy.units(),
                memory,
                device=context.device,
                model=strategy.model,
                schedule=memory.offload_schedule,
                seed=config.train.init_seed,
                rank=strategy.shard_rank,  # replicas must round alike, or they drift apart
                units_ahead=strategy.units_ahead,
                gather_after=strategy.gather_after,
            )
        )
    if memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
        return BucketedUpdates(
            overlap_cpu_offload(
                optimizer,
                strategy.units(),
                model=strategy.model,
                threads=cpu_threads,
                units_ahead=strategy.units_ahead,
                on_updated=strategy.mirror_parameters(),
                device=context.device,
            )
        )
    if memory.optimizer_in_backward:

        def measure(grad: Tensor) -> list[Tensor]:
            return strategy.local_norms([local_tensor(grad)])

        return OptimizerInBackward(optimizer, (param for _, param in strategy.named_parameters()), measure)
    return Updates(optimizer, cpu_threads if memory.cpu_offload else None)
