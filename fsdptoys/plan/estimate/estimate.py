"""Closed-form estimate of a run's memory and time: one analytic step, without a trace and without fitted constants.

Each kind of block is measured once on the meta device (``activations``); a step model issues a strategy's gathers,
reductions and frees (``step_model``, ``fsdp_steps``) to a ledger (``memory_ledger``). Not covered: fragmentation, above
all of native segments; tensors smaller than an allocator's block; host time other than issuing kernels and collectives.
"""

import dataclasses
import functools

import torch

from fsdptoys.config.kernel_choice import AttentionKernel
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Category, MemoryPrediction, Prediction, TimePrediction, Volume
from fsdptoys.models import DecoderModel, ModelConfig, npu_kernels
from fsdptoys.parallel.float8 import Float8
from fsdptoys.plan.simulator.allocator import LARGE_SEGMENT_BYTES, Allocator, build_allocator
from fsdptoys.plan.trace.op_costs import attention_of, matmul_workspace_bytes
from fsdptoys.utils.uncached import Uncached

from .activations import segments_of
from .fsdp_steps import FSDP1StepModel, FSDP2StepModel
from .memory_ledger import Ledger
from .optimizer_step import make_update
from .step_model import ReplicatedStepModel, StepModel
from .units import StepSetup, make_units

SHALLOW_LAYERS = 4  # Blocks of the model in which gaps between allocations are measured


def closed_form(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Predict one rank's memory and time for a validated configuration."""
    train, setup = config.train, _setup(config, hardware, world_size)
    micro_batches = train.grad_accum * getattr(config.parallel, "simulated_ranks", 1)
    ledger, model = _run_steps(setup, hardware, micro_batches, None)
    gaps = _gaps(setup, hardware, micro_batches)
    streams = {name: _full_pages(bytes) + gaps.get(name, 0) for name, bytes in ledger.highest.items() if bytes}
    memory = MemoryPrediction(
        end_bytes=ledger.total,
        peak_bytes=ledger.peak,
        reserved_bytes=sum(streams.values()),
        peak_phase=ledger.peak_phase,
        categories={category: bytes for category, bytes in ledger.peak_categories.items() if bytes},
        streams=streams,
        host_bytes=model.offload_bytes + model.update.host_bytes,
    )
    step = max(ledger.compute, ledger.host)
    busy, communication, transfers = (ledger.sums[name] for name in ("busy", "communication", "transfers"))
    parts = (step, busy, communication, transfers, max(0.0, step - busy - communication - transfers))
    volumes = tuple(Volume(*key, calls, round(sent), time) for key, (calls, sent, time) in ledger.volumes.items())
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
        memory=memory,
        time=TimePrediction(*parts, ledger.kinds, volumes),
        device_type=hardware.device_type,
        doubts=_doubts(config),
    )


def covers_mesh(config: Config) -> bool:
    """Whether the closed form's memory and time are those of the mesh; they have no exchanges within layers."""
    return config.mesh.cp_size == config.mesh.ep_size == 1


def _run_steps(
    setup: StepSetup, hardware: Hardware, micro_batches: int, allocator: Allocator | None
) -> tuple[Ledger, StepModel]:
    ledger, parallel = Ledger(hardware, allocator), setup.config.parallel
    kind: type[StepModel] = FSDP1StepModel if parallel.flattens_parameters else FSDP2StepModel
    if not parallel.shards_parameters:
        kind = ReplicatedStepModel
    model = kind(setup, ledger, make_update(setup, ledger))
    model.construct()
    # The forward's and the backward's threads have one each.
    workspace = matmul_workspace_bytes(hardware)
    ledger.add(Category.temporary, workspace, workspace)
    if setup.config.kernels.attention is AttentionKernel.npu:
        ledger.add(Category.buffers, npu_kernels.MASK_ROWS**2)
    if allocator is None:
        model.make_states()
    else:
        model.step(micro_batches, makes_states=True)
    model.step(micro_batches)
    return ledger, model


def _gaps(setup: StepSetup, hardware: Hardware, micro_batches: int) -> dict[str, int]:
    """Bytes that an allocator reserves on each stream beyond the highest allocation.

    Measured with few layers: gaps depend on the order of tensor sizes, hardly on the depth.
    """
    allocator = build_allocator(setup.config.plan.allocator, device_type=hardware.device_type)
    ledger, _ = _run_steps(_shallow(setup), hardware, min(2, micro_batches), allocator)
    reserved = allocator.reserved_by_stream
    return {
        name: reserved[number] - _full_pages(ledger.highest[name])
        for name, number in ledger.stream_numbers.items()
        if number in reserved
    }


def _shallow(setup: StepSetup) -> StepSetup:
    """The setup with the first few blocks, at least one of each kind."""
    segments, units = setup.segments, setup.units
    kinds = list(dict.fromkeys(map(id, segments.blocks)))
    last_new = max(next(i for i, block in enumerate(segments.blocks) if id(block) == kind) for kind in kinds)
    depth = max(SHALLOW_LAYERS, last_new + 1)
    left_out = set(setup.model.layers[depth:].parameters())
    kept = [(param, local) for param, local in units.root.shards() if param not in left_out]
    root = dataclasses.replace(units.root, params=[param for param, _ in kept], local=[local for _, local in kept])
    segments = dataclasses.replace(segments, blocks=segments.blocks[:depth])
    units = dataclasses.replace(units, blocks=units.blocks[:depth], root=root)
    return dataclasses.replace(setup, segments=segments, units=units)


def _full_pages(bytes: int) -> int:
    return -(-bytes // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES


def _doubts(config: Config) -> tuple[str, ...]:
    train, native = config.train, config.plan.allocator is AllocatorKind.native
    limits = (
        (native, "has no fragmentation of native segments: reserved memory may be higher"),
        (train.compile, "treats train.compile=true as eager"),
        (
            config.mesh.cp_size > 1,
            f"computes full sequences on each rank, of which mesh.cp_size={config.mesh.cp_size} "
            "leaves it a part: memory and time are too high",
        ),
        (config.mesh.ep_size > 1, f"treats mesh.ep_size={config.mesh.ep_size} as 1"),
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
    model = _built(repr(config.model), Uncached(config.model))
    units = make_units(model, parallel, ranks)
    segments = segments_of(config, model, attention_of(config, hardware), [tuple(block) for block in units.blocks])
    return StepSetup(config, world_size, model, segments, units, ranks)


@functools.lru_cache(maxsize=16)
def _built(key: str, config: Uncached[ModelConfig]) -> DecoderModel:
    with torch.device("meta"):
        return config.value.build()


@functools.lru_cache(maxsize=256)
def _flops(key: str, seq_len: int, config: Uncached[ModelConfig]) -> float:
    return _built(key, config).flops_per_token(seq_len)
