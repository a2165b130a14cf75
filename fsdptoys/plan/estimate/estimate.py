"""Closed-form estimate of a run's memory and time: a trace put together from traced units, replayed as any other.

Each unit of the model and the optimizer's step are traced once on the meta device (``unit_traces``, ``update_traces``)
and cached. A step model issues them in the order of a step, with a strategy's gathers, reductions and waits
(``step_model``, ``fsdp_steps``). Two depths are extrapolated as in a full trace. Not covered: tensors that depend on
data; most kernels on single numbers.
"""

import dataclasses
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdptoys.config.kernel_choice import AttentionKernel
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Category, Prediction
from fsdptoys.models import DecoderModel, ModelConfig, npu_kernels
from fsdptoys.models.experts import Experts
from fsdptoys.parallel.expert_parallel import ExpertExchange, Route
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.mesh import EXPERT_AXIS
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace.extrapolate_layers import depths_of, extrapolate
from fsdptoys.plan.trace.op_costs import attention_of, matmul_workspace_bytes
from fsdptoys.plan.trace.op_recorder import PlannedGroup
from fsdptoys.utils.uncached import Uncached

from .fsdp_steps import FSDP1StepModel, FSDP2StepModel
from .optimizer_step import make_update
from .step_model import ReplicatedStepModel, StepModel
from .trace_writer import TraceWriter
from .unit_traces import segments_of
from .units import StepSetup, make_units

LEAST_LAYERS = 4  # Half of a trace's: issued units have no first calls and warm-up, which differ from later ones
MICRO_BATCHES = 3  # Most micro-batches of a step that are issued: the first, one between, the last


def closed_form(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Predict one rank's memory and time for a validated configuration."""
    train, n_layers = config.train, config.model.n_layers
    model = _built(repr(config.model), Uncached(config.model))
    depths = depths_of(config, model, LEAST_LAYERS)
    micro_batches = train.grad_accum * getattr(config.parallel, "simulated_ranks", 1)
    counts = [micro_batches] if micro_batches <= MICRO_BATCHES else [MICRO_BATCHES - 1, MICRO_BATCHES]
    replays = []
    for count in counts:
        with _without_collection():
            each = [_replay(config, hardware, world_size, depth, count) for depth in depths]
        result = each[-1]
        if len(each) > 1:
            result = extrapolate(each[0], each[1], (depths[0], depths[1]), n_layers)
        replays.append(result)
    result, time = replays[-1], replays[-1].time()
    if len(replays) > 1:
        time = extrapolate(replays[0], result, (counts[0], counts[1]), micro_batches).time()
    # Those of one rank: ranks that share sequences have a part of each.
    tokens = train.batch_size * train.seq_len * micro_batches // config.mesh.cp_size
    peak_flops = hardware.peak_flops.get(config.parallel.param_dtype.value)
    return Prediction(
        method="closed form",
        hardware=hardware.name,
        world_size=world_size,
        tokens_per_step=tokens * world_size,
        model_flops_per_step=tokens * _flops(repr(config.model), train.seq_len, Uncached(config.model)),
        peak_flops=peak_flops.value if peak_flops else None,
        memory=result.memory(),
        time=time,
        device_type=hardware.device_type,
        doubts=_doubts(config),
    )


def _replay(config: Config, hardware: Hardware, world_size: int, n_layers: int, micro_batches: int) -> Replay:
    """Issue two steps of a model with that many layers, and replay them."""
    if n_layers != config.model.n_layers:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=n_layers))
    setup, writer = _setup(config, hardware, world_size), TraceWriter()
    writer.mark(0, "construction")
    step_model = _step_model(setup, writer)
    step_model.construct()
    if config.kernels.attention is AttentionKernel.npu:
        writer.alloc(Category.buffers, npu_kernels.MASK_ROWS**2)
    step_model.step(min(2, micro_batches))
    step_model.step(micro_batches)
    writer.trace.host_bytes = step_model.offload_bytes + step_model.update.host_bytes
    return replay(writer.trace, hardware, build_allocator(config.plan.allocator, device_type=hardware.device_type))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold garbage collection, which visits every object for the thousands of new events: a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _step_model(setup: StepSetup, writer: TraceWriter) -> StepModel:
    parallel = setup.config.parallel
    kind: type[StepModel] = FSDP1StepModel if parallel.flattens_parameters else FSDP2StepModel
    if not parallel.shards_parameters:
        kind = ReplicatedStepModel
    return kind(setup, writer, make_update(setup, writer))


def _doubts(config: Config) -> tuple[str, ...]:
    train, native = config.train, config.plan.allocator is AllocatorKind.native
    limits = (
        (native, "has no fragmentation of native segments: reserved memory may be higher"),
        (train.compile, "treats train.compile=true as eager"),
        (config.data.mask_documents, "treats data.mask_documents=true as attention over full sequences"),
        (train.float8 is not Float8.none, f"treats train.float8={train.float8.value} as bfloat16"),
        (
            bool(train.deterministic),
            f"leaves out the float64 tensors of train.deterministic={train.deterministic.word}",
        ),
    )
    return tuple(f"the closed form {limit}" for applies, limit in limits if applies)


def _setup(config: Config, hardware: Hardware, world_size: int) -> StepSetup:
    parallel = config.parallel
    ranks = config.mesh.shard_ranks(world_size) if parallel.shards_parameters else 1
    axes = parallel.axes(world_size, config.mesh)
    model = _built(repr(config.model), Uncached(config.model), axes.ep)
    units = make_units(model, parallel, ranks, axes)
    attention = attention_of(config, hardware)
    segments = segments_of(config, model, attention, [tuple(block) for block in units.blocks])
    workspace = matmul_workspace_bytes(hardware)
    return StepSetup(config, world_size, model, segments, units, ranks, attention, axes, workspace)


@functools.lru_cache(maxsize=64)
def _built(key: str, config: Uncached[ModelConfig], experts_over: int = 1) -> DecoderModel:
    """A model on the meta device; its stacks hold one rank's share of the experts, 1/``experts_over``."""
    with torch.device("meta"):
        model = config.value.build()
    for experts in model.modules() if experts_over > 1 else ():
        if isinstance(experts, Experts):
            for name, stack in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(stack.new_empty(len(stack) // experts_over, *stack.shape[1:])))
            experts.exchange = _Exchange(cast(Any, PlannedGroup(EXPERT_AXIS, experts_over)))
    return model


class _Exchange(ExpertExchange):
    """Of stacks that have this rank's experts only."""

    def _route(self, experts_R: Tensor, n_experts: int) -> tuple[Route, Tensor]:
        return super()._route(experts_R, n_experts * self.group.size())


@functools.lru_cache(maxsize=256)
def _flops(key: str, seq_len: int, config: Uncached[ModelConfig]) -> float:
    return _built(key, config).flops_per_token(seq_len)
