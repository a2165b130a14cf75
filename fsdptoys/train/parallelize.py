"""From a configuration to a model that is spread over ranks: the only place that knows the order of
wrapping.

Each step relies on those before it. Adapters and quantization replace linear layers, which float8
and the layout mode take as they are. Recomputation is inside of compilation where the compiler can
see into it. Hooks of a strategy come last, so that they run outside of both. Parameters get memory
and values when they are sharded, one after another.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from fsdptoys.config.kernel_choice import find_attention_backend, put_kernels
from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.exact import Float64Context, use_exact_ops
from fsdptoys.memory import ActivationOffload, checkpoint_blocks
from fsdptoys.models import DecoderModel, MoEConfig, stored_buffers, use_context
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.models.lora import Samples
from fsdptoys.parallel import ParamInit, Strategy, World
from fsdptoys.parallel.float8 import convert_to_float8
from fsdptoys.parallel.pipeline import Pipeline
from fsdptoys.profiler import explain_out_of_memory

from .compile import CompiledBlock, compile_blocks
from .initial_values import InitialValues
from .moe_balance import RoutingBalance
from .oom_context import construction_context
from .tuning import quantize_base, tune_model


class StandIns(Protocol):
    """Replaces parts of a model that a trace of the trainer does without."""

    def replace(self, model: DecoderModel) -> None:
        """Replace the forwards of a model's segments."""

    def prepare(self, pipeline: Pipeline) -> None:
        """Set what the segments no longer say to a pipeline."""


@dataclass(frozen=True)
class ParallelModel:
    """A model over ranks, and what can no longer be read from it."""

    strategy: Strategy
    model: DecoderModel
    """As it was before the strategy wrapped it."""
    samples: Samples | None
    """The samples of the micro-batch, by which dropout draws; None where nothing is dropped."""
    routing: RoutingBalance | None
    """Balances the routers; None without experts."""
    parameter_sizes: dict[str, int]
    """Elements of each parameter of the full model; a shared one has the first of its names."""
    matrix_names: set[str]
    """Parameters of two dims or more."""
    block_names: set[str]
    """Parameters of blocks."""
    flops_per_token: float
    """Of forward and backward."""
    attention_backend: str | None
    """PyTorch's backend of attention; None for torch_npu's, and where PyTorch does not say."""


def parallelize(
    config: Config,
    world: World,
    param_init: ParamInit | None = None,
    stand_ins: StandIns | None = None,
) -> ParallelModel:
    """Build a model and spread it over ranks. A collective.

    Args:
        config: of the run.
        world: ranks and device.
        param_init: gives parameters their initial values; None for those of the config.
        stand_ins: of a trace; None to train.
    """
    train = config.train
    device = world.device
    # 1. The model on the meta device, which takes no memory; adapters, and kernels of its layers.
    with torch.device("meta"):
        model = config.model.build()
    param_init = param_init or InitialValues(model, config, world.cpu_threads).fill
    samples = tune_model(model, config)
    flops_per_token = model.flops_per_token(train.seq_len)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    put_kernels(model, config.kernels)
    attention_backend = find_attention_backend(
        model,
        config.kernels,
        device.torch_device,
        config.parallel.param_dtype.torch,
        train.seq_len,
        masks=config.data.mask_documents,
    )
    convert_to_float8(model, train.float8, train.float8_all_gather, device.type)
    quantize_base(model, config)
    if train.grain_tokens is not None:
        use_exact_ops(
            model, train.grain_tokens, config.parallel.param_dtype.torch, train.slices
        )
    if stand_ins:
        stand_ins.replace(model)

    # 2. Blocks: recomputed in the backward, then compiled.
    run_blocks(model, config, device)

    # 3. This rank's layers, features, experts, and parts of sequences.
    strategy = config.parallel.build(world)
    if stand_ins and strategy.pipeline is not None:
        stand_ins.prepare(strategy.pipeline)
    strategy.split(model, train.seq_len)
    share_sequences(model, config, strategy, samples)
    has_routers = isinstance(config.model, MoEConfig) and not stand_ins
    routing = RoutingBalance(model, strategy) if has_routers else None

    # 4. Shards with memory and values.
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    with explain_out_of_memory(
        device, construction_context(config, world, sum(sizes.values()))
    ):
        strategy.stored_buffers = stored_buffers(model)
        strategy.shard(model, param_init)
        for buffer in strategy.stored_buffers:
            param_init(buffer.tensor, buffer.name)
    return ParallelModel(
        strategy,
        model,
        samples,
        routing,
        sizes,
        {name for name, shape in shapes.items() if len(shape) >= 2},
        {name for name in shapes if name.startswith(f"{model.blocks_name}.")},
        flops_per_token,
        attention_backend,
    )


def run_blocks(model: DecoderModel, config: Config, device: Device) -> None:
    """Choose which blocks are recomputed, offloaded and compiled."""
    memory = config.memory
    checkpoint_blocks(
        model.layers,
        memory.gradient_checkpointing,
        start_index=memory.checkpointing_start_index,
        every=memory.checkpointing_every,
        save=memory.checkpointing_save,
        offload=ActivationOffload(device.torch_device)
        if memory.activation_offload
        else None,
    )
    if config.train.compile:
        # The compiler skips exchanges of shared sequences and split features, which split a block's
        # graph as hooks do.
        exchanges = config.mesh.cp_size * config.mesh.tp_size > 1
        inner_hooks = config.parallel.hooks_parts_of_blocks(config.model) or exchanges
        compile_blocks(
            model.layers, memory.checkpointing_budget, inner_hooks=inner_hooks
        )
    elif model.swaps_blocks:
        for block in model.layers:
            assert isinstance(block, RunnableBlock)
            block.execute = CompiledBlock(block.compute)


def share_sequences(
    model: DecoderModel, config: Config, strategy: Strategy, samples: Samples | None
) -> None:
    """Let a model, and its dropout, keep this rank's part of sequences that ranks share."""
    if strategy.context_group is not None:
        context = strategy.build_context(config.train.compile)
        use_context(
            model,
            context if config.train.grain_tokens is None else Float64Context(context),
        )
    if samples is not None:
        samples.context = model.context
