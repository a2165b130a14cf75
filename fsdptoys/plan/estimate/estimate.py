"""A run's memory and time at once: one step walked through in thought, nothing traced, no fitted constants.

Blocks are measured, once, on the meta device (``activations``); a strategy's rules say which units are gathered, kept
and reduced when (``strategies``); a ledger adds up what each stream holds and when each lane is free (``ledger``). What
an allocator would reserve is the sum over streams of the most that each holds at a time, in whole pages.

It is for searches, and an alarm beside the trace, which runs the real code: where the two differ, one of them is wrong.
What it leaves out: fragmentation, of native segments above all; tensors of less than a block's size; the time that the
host takes for anything but issuing kernels and collectives.
"""

import dataclasses
import functools

import torch

from fsdptoys.config.kernel_choice import KernelLibrary
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Category, MemoryPrediction, Prediction, TimePrediction
from fsdptoys.models import DecoderModel, ModelConfig, npu_kernels
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import FSDPConfig, ReshardAfterForward, Wrap
from fsdptoys.plan.simulator.allocator import LARGE_SEGMENT_BYTES, Allocator, build_allocator
from fsdptoys.plan.trace.op_costs import matmul_workspace_bytes

from .activations import segments_of
from .fsdp_steps import FSDP1StepModel, FSDP2StepModel
from .memory_ledger import Ledger
from .replicated import ReplicatedStepModel
from .step_model import StepModel, StepSetup
from .units import Units, make_units

FEW_LAYERS = 4
"""With which gaps between blocks of memory are looked for."""


def closed_form(config: Config, hardware: Hardware, world_size: int, allocator: AllocatorKind) -> Prediction:
    """Foretell one rank's memory and time.

    Args:
        config: validated.
        hardware: on which it is imagined.
        world_size: ranks over all machines.
        allocator: how the device's allocator takes memory.
    """
    model, units, flops_per_token = _model(config, world_size)
    sharded = isinstance(config.parallel, FSDPConfig)
    setup = StepSetup(
        config=config,
        world_size=world_size,
        model=model,
        segments=segments_of(config, model, hardware.attention),
        units=units,
        shard_ranks=config.mesh.shard_ranks(world_size) if sharded else 1,
    )
    train = config.train
    local_ranks = getattr(config.parallel, "simulated_ranks", 1)
    micro_batches = train.grad_accum * local_ranks
    ledger, walk = _walk(setup, hardware, micro_batches, None)
    gaps = _gaps(setup, hardware, micro_batches, allocator)
    streams = {name: _whole_pages(bytes) + gaps.get(name, 0) for name, bytes in ledger.highest.items() if bytes}
    tokens = train.batch_size * train.seq_len * train.grad_accum * local_ranks
    dtype = config.parallel.param_dtype.value
    peak_flops = hardware.peak_flops.get(dtype)
    sums, step_seconds = ledger.sums, max(ledger.compute, ledger.host)
    return Prediction(
        method="closed form",
        hardware=hardware.name,
        world_size=world_size,
        tokens_per_step=tokens * world_size,
        model_flops_per_step=tokens * flops_per_token,
        peak_flops=peak_flops.value if peak_flops else None,
        memory=MemoryPrediction(
            end_bytes=ledger.total,
            peak_bytes=ledger.peak,
            reserved_bytes=sum(streams.values()),
            peak_phase=ledger.peak_phase,
            categories={category: bytes for category, bytes in ledger.peak_categories.items() if bytes},
            streams=streams,
            host_bytes=walk.host_bytes,
        ),
        time=TimePrediction(
            step_seconds=step_seconds,
            compute_seconds=sums["busy"],
            exposed_communication_seconds=sums["communication"],
            exposed_transfer_seconds=sums["transfers"],
            host_seconds=max(
                0.0, max(ledger.compute, ledger.host) - sums["busy"] - sums["communication"] - sums["transfers"]
            ),
            kinds=dict(ledger.kinds),
            volumes=ledger.all_volumes(),
        ),
        device_type=hardware.device_type,
        doubts=_doubts(config, allocator),
    )


def _walk(
    setup: StepSetup, hardware: Hardware, micro_batches: int, allocator: Allocator | None
) -> tuple[Ledger, StepModel]:
    """Walk through a step; with an allocator through two, since the first leaves gaps for the second."""
    ledger = Ledger(hardware, allocator)
    kinds: dict[str, type[StepModel]] = {"fsdp1": FSDP1StepModel, "fsdp2": FSDP2StepModel}
    walk = kinds.get(setup.config.parallel.name, ReplicatedStepModel)(setup, ledger)
    walk.construct()
    # One for the forward's thread and one for the backward's.
    workspace = matmul_workspace_bytes(hardware)
    ledger.add(Category.temporary, 2 * workspace, pieces=[workspace] * 2)
    if setup.config.kernels.attention is KernelLibrary.npu:
        ledger.add(Category.buffers, npu_kernels.MASK_ROWS**2)
    if allocator is None:
        walk.update.make_states()
    else:
        walk.step(micro_batches, makes_states=True)
    walk.step(micro_batches)
    return ledger, walk


def _gaps(setup: StepSetup, hardware: Hardware, micro_batches: int, kind: AllocatorKind) -> dict[str, int]:
    """What an allocator reserves of each stream beyond the most that is allocated at a time.

    Found with few layers, since that is how the sizes of tensors follow one another, and not how many layers do.
    """
    few = _shallow(setup)
    allocator = build_allocator(kind, device_type=hardware.device_type)
    ledger, _ = _walk(few, hardware, min(2, micro_batches), allocator)
    names = ledger.stream_names()
    return {
        names[number]: reserved - _whole_pages(ledger.highest[names[number]])
        for number, reserved in allocator.reserved_by_stream.items()
    }


def _shallow(setup: StepSetup) -> StepSetup:
    """The same with the first few blocks, among them one of each kind."""
    segments, units = setup.segments, setup.units
    kinds = list(dict.fromkeys(map(id, segments.blocks)))
    last_new = max(next(i for i, block in enumerate(segments.blocks) if id(block) == kind) for kind in kinds)
    depth = max(FEW_LAYERS, last_new + 1)
    return dataclasses.replace(
        setup,
        segments=dataclasses.replace(segments, blocks=segments.blocks[:depth]),
        units=dataclasses.replace(units, blocks=units.blocks[:depth]),
    )


def _whole_pages(bytes: int) -> int:
    return -(-bytes // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES


def _doubts(config: Config, allocator: AllocatorKind) -> tuple[str, ...]:
    doubts = []
    if allocator is AllocatorKind.native:
        doubts.append("the closed form knows no fragmentation, which native segments have: reserved memory may be more")
    if config.train.compile:
        doubts.append("the closed form takes train.compile=true for eager kernels")
    if config.data.mask_documents:
        doubts.append("the closed form takes data.mask_documents=true for attention over whole sequences")
    if config.train.float8 is not Float8.none:
        doubts.append(f"the closed form takes train.float8={config.train.float8.value} for bfloat16")
    if config.train.deterministic:
        doubts.append("the closed form leaves out what train.deterministic=true adds up in float64")
    return tuple(doubts)


def _model(config: Config, world_size: int) -> tuple[DecoderModel, Units, float]:
    """The model on the meta device, its units, and its FLOPs a token."""
    parallel = config.parallel
    sharded = isinstance(parallel, FSDPConfig)
    ranks = config.mesh.shard_ranks(world_size) if sharded else 1
    wrap = parallel.wrap if isinstance(parallel, FSDPConfig) else Wrap.block
    model = _built(repr(config.model), _Held(config.model))
    units = _units(repr(config.model), parallel.name, wrap, ranks, _Held(config.model))
    if isinstance(parallel, FSDPConfig):
        _set_resharding(units, parallel)
    return model, units, _flops(repr(config.model), config.train.seq_len, _Held(config.model))


def _set_resharding(units: Units, parallel: FSDPConfig) -> None:
    policy = parallel.reshard_after_forward
    for unit in units.in_forward():
        unit.resharded = policy is not ReshardAfterForward.never
    outer = policy is ReshardAfterForward.always
    units.head.resharded = outer
    # FSDP1 never frees its root after the forward.
    units.root.resharded = outer and parallel.name == "fsdp2"
    if units.embedding is units.head:
        units.embedding.resharded = outer and parallel.name == "fsdp2"
    elif parallel.name == "fsdp2":
        # The gradient of a look-up needs no weights.
        units.embedding.gathered_in_backward = False


class _Held:
    """A model's configuration that a cache does not look at, since its key says the same."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=16)
def _built(key: str, held: _Held) -> DecoderModel:
    with torch.device("meta"):
        return held.config.build()


@functools.lru_cache(maxsize=256)
def _units(key: str, strategy: str, wrap: Wrap, ranks: int, held: _Held) -> Units:
    return make_units(_built(key, held), strategy, wrap, ranks)


@functools.lru_cache(maxsize=256)
def _flops(key: str, seq_len: int, held: _Held) -> float:
    return _built(key, held).flops_per_token(seq_len)
