"""Prediction of a pipeline: one rank along its axis after the other is traced, and all are replayed together.

Each has another order of forwards and backwards, and other layers, so each is traced, with all its layers.
Of many micro-batches two smaller numbers are traced, and every number of every phase is extrapolated: once the pipeline
is full, each micro-batch adds the same to the time of all ranks, and to their memory either nothing or what one needs.
"""

import dataclasses
from collections.abc import Sequence

import torch

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import StagePrediction
from fsdptoys.models.stage_split import split_model
from fsdptoys.models.stages import Stage
from fsdptoys.parallel import FSDP2Config

from .simulator.allocator import build_allocator
from .simulator.events import Trace
from .simulator.meetings import replay_together
from .simulator.replay import Replay
from .trace.extrapolate_layers import extrapolate
from .trace.tracer import trace_all


class PipelinePredictor:
    """Replays of the pipeline ranks; the traces are made once."""

    def __init__(self, config: Config, hardware: Hardware, world_size: int) -> None:
        self.config, self.ranks = config, config.mesh.pp_size
        self.counts = microbatch_counts(config)
        """Numbers of micro-batches traced."""
        distance = world_size // self.ranks
        configs = [
            dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accum=count))
            for count in self.counts
        ]
        jobs = [(each, rank * distance) for each in configs for rank in range(self.ranks)]
        self._traces: list[Trace] = trace_all(jobs, hardware, world_size)

    @property
    def method(self) -> str:
        """How the numbers were found."""
        if len(self.counts) == 1:
            return "traced, all stages"
        return f"traced, all stages, {self.counts[0]} and {self.counts[1]} micro-batches"

    def __call__(self, hardware: Hardware) -> list[Replay]:
        """Replay the traces on hardware of the traced device type, and extrapolate to the run's micro-batches."""
        results = []
        for start in range(0, len(self._traces), self.ranks):
            traces = self._traces[start : start + self.ranks]
            kind = self.config.plan.allocator
            allocators = [build_allocator(kind, device_type=hardware.device_type) for _ in traces]
            results.append(replay_together(traces, hardware, allocators))
        if len(results) == 1:
            return list(results[0])
        counts = (self.counts[0], self.counts[1])
        return [
            extrapolate(few, more, counts, self.config.train.grad_accum) for few, more in zip(*results, strict=True)
        ]


def microbatch_counts(config: Config) -> list[int]:
    """Numbers of micro-batches to trace: two, or the run's if two would not be fewer.

    N of them fill a pipeline of N ranks, and one more has its forward after a backward, next to gradients. With two
    stages on each, a rank has up to 3 N − 1 forwards under way, those of 2 N micro-batches.
    """
    count, ranks = config.train.grad_accum, config.mesh.pp_size
    counts = [2 * ranks, 3 * ranks]
    if config.plan.exact or config.plan.allocator is AllocatorKind.native or count <= sum(counts):
        return [count]
    return counts


def stage_predictions(config: Config, replays: Sequence[Replay]) -> tuple[StagePrediction, ...]:
    """Memory and time of each pipeline rank."""
    found = []
    for layers, each in zip(layers_of_ranks(config), replays, strict=True):
        memory, time = each.memory(), each.time()
        found.append(
            StagePrediction(
                layers=layers,
                peak_bytes=memory.peak_bytes,
                reserved_bytes=memory.reserved_bytes,
                compute_seconds=time.compute_seconds,
                wait_seconds=max(0.0, time.stage_seconds),  # a line through waits that end can leave the axis
            )
        )
    return tuple(found)


def layers_of_ranks(config: Config) -> list[str]:
    """Layers of each rank of a pipeline, such as ``0-3, 8-11``."""
    names = [f"{each.first}-{each.end - 1}" if each.size > 1 else str(each.first) for each in stages_of(config)]
    return [", ".join(names[rank :: config.mesh.pp_size]) for rank in range(config.mesh.pp_size)]


def stages_of(config: Config) -> list[Stage]:
    """Stages of a pipeline, of which rank r of N has stages r, r + N, ...."""
    assert isinstance(config.parallel, FSDP2Config)
    with torch.device("meta"):
        model = config.model.build()
    return split_model(model, config.mesh.pp_size * config.parallel.schedule.stages_per_rank, config.train.seq_len)
