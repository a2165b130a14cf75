"""Apply memory options and compilation before sharding; choose how the optimizer steps and when numbers are read."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.loss import LossFn, Vocabulary, build_loss
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
from fsdptoys.metrics import SpikeDetector
from fsdptoys.models import DecoderModel, use_context
from fsdptoys.models.grain_attention import Float64Context
from fsdptoys.models.grains import use_grains
from fsdptoys.models.lora import Samples
from fsdptoys.parallel import ParallelContext, Strategy
from fsdptoys.parallel.context import build_context
from fsdptoys.parallel.precision import DType
from fsdptoys.utils.dtensor import local_tensor

from .compile import compile_blocks
from .document_flops import DocumentCounter
from .moe_balance import RoutingBalance
from .skipped_steps import SkippedSteps
from .step_readings import StepReadings
from .tuning import quantize_base


def prepare_blocks(model: DecoderModel, config: Config, device: Device) -> None:
    """Apply quantization, grains, activation checkpointing and compilation before anything wraps the blocks."""
    quantize_base(model, config)
    memory, grain = config.memory, config.train.grain_tokens
    if grain is not None:
        use_grains(model, grain, config.parallel.param_dtype.torch, config.train.slices)
    checkpoint_blocks(
        model.layers,
        memory.gradient_checkpointing,
        start_index=memory.checkpointing_start_index,
        every=memory.checkpointing_every,
        save=memory.checkpointing_save,
        offload=ActivationOffload(device.torch_device) if memory.activation_offload else None,
    )
    if config.train.compile:
        # The compiler skips exchanges of shared sequences and split features, which split a block's graph as hooks do.
        exchanges = config.mesh.cp_size * config.mesh.tp_size > 1
        inner_hooks = config.parallel.hooks_parts_of_blocks(config.model) or exchanges
        compile_blocks(model.layers, memory.checkpointing_budget, inner_hooks=inner_hooks)


def share_sequences(model: DecoderModel, config: Config, strategy: Strategy, samples: Samples | None) -> None:
    """Let a model, and its dropout, keep this rank's part of sequences that ranks share, before it is wrapped."""
    if strategy.context_group is not None:
        compiles = config.train.compile
        context = build_context(strategy.config.context, strategy.context_group, compiles=compiles)
        use_context(model, context if config.train.grain_tokens is None else Float64Context(context))
    if samples is not None:
        samples.context = model.context


def loss_builder(config: Config, strategy: Strategy) -> Callable[..., LossFn]:
    """``build_loss`` with the settings of a run, except for the objective."""
    memory, group = config.memory, strategy.tensor_group
    return functools.partial(
        build_loss,
        memory.chunk_loss,
        None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens),
        memory.chunk_grad_dtype.torch,
        grain=config.train.grain_tokens,
        vocabulary=Vocabulary(group) if group is not None or config.train.slices > 1 else None,
        slices=config.train.slices // strategy.mesh_axes.tp,
        dtype=config.parallel.param_dtype.torch,
    )


def build_updates(optimizer: torch.optim.Optimizer, strategy: Strategy, config: Config, cpu_threads: int) -> Updates:
    """Choose where and when the optimizer, made after ``parallelize``, steps; ``cpu_threads`` are for host memory."""
    memory, context = config.memory, strategy.context
    units = [(module, [param for param in params if param.requires_grad]) for module, params in strategy.units()]
    units = [(module, params) for module, params in units if params]
    if memory.optimizer_offload:
        assert config.train.init_seed is not None
        return BucketedUpdates(
            offload_optimizer(
                optimizer,
                units,
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
                units,
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

        return OptimizerInBackward(optimizer, (param for _, param in strategy.trainable_parameters()), measure)
    return Updates(optimizer, cpu_threads if memory.cpu_offload else None)


def build_readings(
    config: Config,
    context: ParallelContext,
    updates: Updates,
    skipped: SkippedSteps,
    spikes: SpikeDetector,
    documents: DocumentCounter | None,
    routing: RoutingBalance | None,
    flops_per_token: float,
) -> StepReadings:
    """Choose when the numbers of steps are read, and the parts that interpret them."""
    train, scaled = config.train, skipped.scaler is not None
    return StepReadings(
        train,
        context.device,
        skipped,
        spikes,
        in_step=train.skip_nonfinite and (scaled or not updates.skips_on_device),
        log_every=config.metrics.log_every,
        flops_per_token=documents.flops_per_token if documents else lambda _: flops_per_token,
        routing=routing.metrics if routing else None,
        n_document_counts=documents.n_counts if documents else 0,
        world_size=context.world_size,
        # Published peak FLOPs are for bfloat16; data sheets state the same for float16.
        peak_flops=context.device.peak_flops if config.parallel.param_dtype is not DType.float32 else None,
    )
