"""Choose the ranks of a trainer, and build its optimizer."""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.memory import (
    BucketedStepper,
    CPUOffloadExecutor,
    OptimizerInBackward,
    OptimizerStepper,
    offload_optimizer,
    overlap_cpu_offload,
    threads_per_rank,
)
from fsdptoys.optim import build_optimizer
from fsdptoys.parallel import Strategy, World
from fsdptoys.parallel.float8 import prepare_all_gathers
from fsdptoys.profiler import explain_out_of_memory
from fsdptoys.utils.dtensor import local_tensor

from .distributed import device_of
from .oom_context import construction_context
from .parallelize import ParallelModel


def build_world(config: Config, device: Device | None = None) -> World:
    """Return the ranks of the process group, on a device or on that of the config and the local
    rank."""
    world_size = dist.get_world_size()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return World(
        device=device or device_of(config),
        rank=dist.get_rank(),
        world_size=world_size,
        mesh=config.mesh,
        deterministic=config.train.deterministic,
        cpu_offload=config.memory.cpu_offload,
        sum_dtype=config.train.sum_dtype.torch,
        timeout=timedelta(seconds=config.launch.timeout_seconds),
        cpu_threads=config.memory.cpu_threads or threads_per_rank(local_ranks),
    )


def build_stepper(config: Config, parallel_model: ParallelModel) -> OptimizerStepper:
    """Build the optimizer of a model over ranks, and choose where and when it steps."""
    strategy = parallel_model.strategy
    optimizer = build_optimizer(
        config.optim,
        strategy.trainable_parameters(),
        parallel_model.matrix_names,
        parallel_model.block_names,
    )
    strategy.attach(optimizer)
    elements = sum(parallel_model.parameter_sizes.values())
    explain = construction_context(config, strategy.world, elements)
    with explain_out_of_memory(strategy.world.device, explain):
        stepper = _choose_stepper(optimizer, strategy, config)
    # With unit-by-unit updates, each unit's all-gather computes its own scales.
    if config.train.float8_all_gather and not stepper.unit_by_unit:
        stepper.after_update = functools.partial(prepare_all_gathers, strategy.model)
    return stepper


def _choose_stepper(
    optimizer: torch.optim.Optimizer, strategy: Strategy, config: Config
) -> OptimizerStepper:
    memory = config.memory
    world = strategy.world
    units = [
        (module, [param for param in params if param.requires_grad])
        for module, params in strategy.units()
    ]
    units = [(module, params) for module, params in units if params]
    if memory.optimizer_offload:
        assert config.train.init_seed is not None
        return BucketedStepper(
            offload_optimizer(
                optimizer,
                units,
                memory,
                device=world.device,
                model=strategy.model,
                schedule=memory.offload_schedule,
                seed=config.train.init_seed,
                rank=strategy.shard_rank,  # replicas must round alike, or they drift apart
                units_ahead=strategy.units_ahead,
                gather_after=strategy.gather_after,
            )
        )
    if memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
        return BucketedStepper(
            overlap_cpu_offload(
                optimizer,
                units,
                model=strategy.model,
                threads=world.cpu_threads,
                units_ahead=strategy.units_ahead,
                on_updated=strategy.mirror_parameters(),
                device=world.device,
            )
        )
    if memory.optimizer_in_backward:

        def measure(grad: Tensor) -> list[Tensor]:
            return strategy.local_norms([local_tensor(grad)])

        return OptimizerInBackward(
            optimizer, (param for _, param in strategy.trainable_parameters()), measure
        )
    return OptimizerStepper(
        optimizer, world.cpu_threads if memory.cpu_offload else None
    )
