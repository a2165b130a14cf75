"""Estimate of a run's memory and time: a trace put together from recorded parts, replayed on models
of a device.

The contents of a model's units are traced once on the meta device and cached (``unit_traces``). The
order of a step, with a strategy's gathers, reductions, offload and optimizer, is that of a
skeleton: the trainer's own steps over a model of few layers with empty forwards (``skeleton``). It
serves all batches, lengths, losses and kernels. The contents are inserted into
it (``splice``). Two depths are extrapolated to all layers. Not covered: tensors that depend on
data; the balance of routers.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdptoys.config.kernel_choice import AttentionKernel
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.memory import GradientCheckpointing
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    Prediction,
    StagePrediction,
    TimePrediction,
)
from fsdptoys.models import DecoderModel, npu_kernels
from fsdptoys.models.moe import Experts
from fsdptoys.parallel import FSDP1Config, FSDPConfig, SingleConfig
from fsdptoys.parallel.expert_parallel import ExpertExchange, Route
from fsdptoys.parallel.mesh import EXPERT_AXIS, TENSOR_AXIS
from fsdptoys.parallel.tensor_parallel import FeatureSplit, TensorExchange
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, Alloc, Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace import tracing_process
from fsdptoys.plan.trace.extrapolate_layers import (
    depths_of,
    extrapolate,
    layers_in_turn,
)
from fsdptoys.plan.trace.groups import PlannedGroup
from fsdptoys.plan.trace.op_costs import attention_of, matmul_workspace_bytes
from fsdptoys.plan.trace.tracer import DEVICE_TYPES
from fsdptoys.train.tuning import quantize_base, tune_model
from fsdptoys.utils.uncached import Uncached

from .full_traces import full_replays
from .pipeline import Part, Replays, predict_pipeline
from .skeleton import reduced, trace_skeleton
from .splice import Splicer
from .unit_traces import segments_of

LEAST_LAYERS = 3
"""Fewest layers of the shallower skeleton. With two, times of activation and optimizer offload are
up to 18% off."""
LEAST_LAYERS_FSDP1 = 4
"""The same for FSDP1. With three, the reserved memory of Llama 2 7B is up to 55% above that of a
full trace; with four it is within 6%."""
TRACED: dict[str, Trace] = {}  # Skeletons by their requests
MICRO_BATCHES = 3  # Most micro-batches of a skeleton: the first, one between, the last


def fast_estimate(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Predict one rank's memory and time for a validated configuration."""
    train = config.train
    mesh = config.mesh
    is_traced = not config.model.capabilities.fast_estimate
    if is_traced:
        # Forks then have the packages that it imports
        _build_model(_model_key(config), Uncached(config))
    tracing_process.start_tracing(DEVICE_TYPES[attention_of(config, hardware)])
    replay_parts = full_replays if is_traced else _replays
    replays = functools.partial(replay_parts, config, hardware, world_size)
    stages: tuple[StagePrediction, ...] = ()
    with _without_collection():
        if mesh.pp_size > 1:
            model = _build_model(_model_key(config), Uncached(config))
            turn = math.lcm(layers_in_turn(model), config.memory.checkpointing_every)
            memory, time, stages = predict_pipeline(
                config, replays, (2 * turn, 3 * turn)
            )
        else:
            memory, time = _of_one_rank(config, replays)
    # Those of one rank: ranks that share sequences, or have other layers, have a part of each.
    micro_batches = _micro_batches(config)
    tokens = (
        train.batch_size
        * train.seq_len
        * micro_batches
        / (mesh.cp_size * mesh.tp_size * mesh.pp_size)
    )
    peak_flops = hardware.peak_flops.get(config.parallel.param_dtype.value)
    return Prediction(
        method="traced" if is_traced else "estimated",
        hardware=hardware.name,
        world_size=world_size,
        tokens_per_step=round(tokens * world_size),
        model_flops_per_step=tokens
        * _flops(_model_key(config), train.seq_len, Uncached(config)),
        peak_flops=peak_flops.value if peak_flops else None,
        memory=memory,
        time=time,
        device_type=hardware.device_type,
        stages=stages,
    )


def _of_one_rank(
    config: Config, replays: Replays
) -> tuple[MemoryPrediction, TimePrediction]:
    """Two depths, and two numbers of micro-batches, extrapolated to the run's."""
    n_layers = config.model.n_layers
    is_fsdp1 = isinstance(config.parallel, FSDP1Config)
    least = LEAST_LAYERS_FSDP1 if is_fsdp1 else LEAST_LAYERS
    depths = depths_of(
        config, _build_model(_model_key(config), Uncached(config)), least
    )
    micro_batches = _micro_batches(config)
    counts = (
        [micro_batches]
        if micro_batches <= MICRO_BATCHES
        else [MICRO_BATCHES - 1, MICRO_BATCHES]
    )
    results = []
    for count in counts:
        results_by_depth = replays([Part(depth, count) for depth in depths])
        result = results_by_depth[-1]
        if len(results_by_depth) > 1:
            result = extrapolate(
                results_by_depth[0], result, (depths[0], depths[1]), n_layers
            )
        results.append(result)
    time = results[-1].time()
    if len(results) > 1:
        time = extrapolate(
            results[0].time(), time, (counts[0], counts[1]), micro_batches
        )
    return result.memory(), time


def _micro_batches(config: Config) -> int:
    """Micro-batches of a step, those of simulated ranks included."""
    count: int = getattr(config.parallel, "simulated_ranks", 1)
    return config.train.grad_accum * count


def _replays(
    config: Config, hardware: Hardware, world_size: int, parts: Sequence[Part]
) -> list[Replay]:
    """Replay two steps of each part; all parts have equally many pipeline ranks."""
    memory = config.memory
    attention = attention_of(config, hardware)
    offloads = (
        memory.activation_offload
        and memory.gradient_checkpointing is not GradientCheckpointing.none
    )
    axes = config.parallel.axes(world_size, config.mesh)
    contents = []
    requests = []
    world_size = world_size // config.mesh.pp_size * parts[0].ranks
    for part in parts:
        deep = dataclasses.replace(
            config, model=config.model.with_settings(n_layers=part.n_layers)
        )
        deep.train = dataclasses.replace(config.train, grad_accum=part.micro_batches)
        if part.ranks > 1:
            deep.mesh = dataclasses.replace(config.mesh, pp_size=part.ranks)
            deep.parallel = dataclasses.replace(config.parallel, schedule=part.schedule)  # type: ignore[call-arg]
        if isinstance(config.parallel, SingleConfig):
            # In turn, as micro-batches
            deep.parallel = dataclasses.replace(config.parallel, simulated_ranks=1)
        model = _build_model(_model_key(deep), Uncached(deep), axes.ep, axes.tp)
        sparse = axes.ep > 1 or (
            axes.tp > 1
            and any(isinstance(module, Experts) for module in model.modules())
        )
        units = (
            config.parallel.units(model, sparse)
            if isinstance(config.parallel, FSDPConfig)
            else ()
        )
        names = tuple(name for unit in units for name in unit.modules)
        segments = segments_of(deep, model, attention, names)
        inner = any(
            name.startswith("layers.") and name.count(".") > 1 for name in names
        )
        contents.append(segments)
        ties = model.lm_head.weight is model.embed_tokens.weight
        layouts = tuple(segment.layout(offloads, ties) for segment in segments)
        rank = part.rank * world_size // part.ranks
        requests.append(
            (rank, trace_skeleton, (reduced(deep, inner), hardware, attention, layouts))
        )
    skeletons = _skeletons(DEVICE_TYPES[attention], world_size, requests)
    replays = []
    for segments, skeleton in zip(contents, skeletons, strict=True):
        workspace_bytes = matmul_workspace_bytes(hardware)
        trace = Splicer(skeleton, segments, workspace_bytes, offloads).run()
        if config.kernels.attention is AttentionKernel.npu:
            block = (
                max(event.block for event in trace.events if isinstance(event, Alloc))
                + 1
            )
            trace.events.insert(
                1,
                Alloc(
                    block, npu_kernels.MASK_ROWS**2, COMPUTE_STREAM, Category.buffers
                ),
            )
        allocator = build_allocator(
            config.plan.allocator, device_type=hardware.device_type
        )
        replays.append(replay(trace, hardware, allocator))
    return replays


def _skeletons(
    device_type: str, world_size: int, requests: Sequence[Any]
) -> list[Trace]:
    """Return the skeletons of requests. Each is traced once."""
    keys = [
        repr((device_type, world_size, rank, vars(config), *others))
        for rank, _, (config, *others) in requests
    ]
    missing = {
        key: request
        for key, request in zip(keys, requests, strict=True)
        if key not in TRACED
    }
    traces = tracing_process.traced(device_type, world_size, list(missing.values()))
    TRACED.update(zip(missing, traces, strict=True))
    return [TRACED[key] for key in keys]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold garbage collection, which visits every object for the thousands of new events: a third
    of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _model_key(config: Config) -> str:
    """Everything that decides the modules of a model and the dtypes of its parameters."""
    return repr(
        (
            config.model,
            config.tune,
            config.parallel.param_dtype,
            config.parallel.capabilities.mixed_dtypes,
        )
    )


@functools.lru_cache(maxsize=64)
def _build_model(
    key: str, config: Uncached[Config], experts_over: int = 1, features_over: int = 1
) -> DecoderModel:
    """A model on the meta device, with one rank's share of the experts and of each layer's
    features."""
    with torch.device("meta"):
        model = config.value.model.build()
        samples = tune_model(model, config.value)
        if samples is not None:
            samples.numbers_B = torch.empty(
                config.value.train.batch_size, dtype=torch.int64
            )
        quantize_base(model, config.value)
        model.init_buffers(torch.device("meta"))
    if features_over > 1:
        exchange = TensorExchange(cast(Any, PlannedGroup(TENSOR_AXIS, features_over)))
        FeatureSplit(exchange, cast(Any, None)).apply(model)
    for experts in model.modules() if experts_over > 1 else ():
        if isinstance(experts, Experts):
            for name, stack in list(experts.named_parameters()):
                setattr(
                    experts,
                    name,
                    nn.Parameter(
                        stack.new_empty(len(stack) // experts_over, *stack.shape[1:])
                    ),
                )
            experts.dispatch = _Exchange(
                cast(Any, PlannedGroup(EXPERT_AXIS, experts_over))
            )
    return model


class _Exchange(ExpertExchange):
    """Of stacks that have this rank's experts only."""

    def _route(self, experts_R: Tensor, n_experts: int) -> tuple[Route, Tensor]:
        return super()._route(experts_R, n_experts * self.group.size())


@functools.lru_cache(maxsize=256)
def _flops(key: str, seq_len: int, config: Uncached[Config]) -> float:
    return _build_model(key, config).flops_per_token(seq_len)
