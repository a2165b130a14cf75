"""Estimate of a pipeline: skeletons of the first and the last rank of short pipelines,
extrapolated.

With 1f1b, the first of N ranks has N micro-batches in flight, the last has one. So pipelines of two
and three ranks, with one micro-batch more than ranks, give the memory of each further micro-batch
in flight, and the time of each further one of the step. With gpipe, all are in flight on all ranks,
and two pipelines of two ranks give the same. The number in flight, and the bubble, follow from the
schedule's order and the time of each stage.

zero_bubble is taken as interleaved, with longer waits, and with the logits of all micro-batches,
which its last stage keeps. Not covered: gradients of weights that fill waits; times of messages in
waits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    StagePrediction,
    TimePrediction,
)
from fsdptoys.models.stage_split import split_model
from fsdptoys.models.stages import Stage
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.plan.simulator.pipeline_schedules import (
    duration,
    most_in_flight,
    order_of,
)
from fsdptoys.plan.simulator.replay import Replay
from fsdptoys.plan.trace.extrapolate_layers import extrapolate

OF_TABLE = (
    Category.parameters,
    Category.gradients,
    Category.optimizer_states,
    Category.gathered_parameters,
)
LASTING = {*OF_TABLE, Category.exchange_buffers} - {Category.gathered_parameters}
"""What remains after a step."""


class Part(NamedTuple):
    """A skeleton to trace."""

    n_layers: int  # Of the whole model
    micro_batches: int
    ranks: int = 1  # Of a pipeline
    rank: int = 0
    schedule: PipelineSchedule | None = None


Replays = Callable[[Sequence[Part]], list[Replay]]


class _Traced:
    """The first and the last rank of two short pipelines. Every number is extrapolated.

    Args:
        replays: replays skeletons of pipelines with equally many ranks.
        depths: numbers of layers on a rank to trace.
        schedule: of the run.
        count: micro-batches of the run.
    """

    def __init__(
        self,
        replays: Replays,
        depths: tuple[int, int],
        schedule: PipelineSchedule,
        count: int,
    ) -> None:
        self.depths = depths
        self.count = count
        self.all_at_once = schedule is PipelineSchedule.gpipe
        kind = schedule if self.all_at_once else PipelineSchedule("1f1b")
        lengths = (2, 2) if self.all_at_once else (2, 3)
        self.in_flight = (3, 4) if self.all_at_once else lengths
        """Micro-batches in flight on the first rank."""
        self.counts = (3, 4)
        self._pipelines: list[dict[tuple[bool, int], Replay]] = []
        for length, micro_batches in zip(lengths, self.counts, strict=True):
            cases = [(depth, rank) for depth in depths for rank in (0, length - 1)]
            results = replays(
                [
                    Part(length * depth, micro_batches, length, rank, kind)
                    for depth, rank in cases
                ]
            )
            self._pipelines.append(
                {
                    (rank > 0, depth): result
                    for (depth, rank), result in zip(cases, results, strict=True)
                }
            )

    def pair(self, layers: int, is_last: bool = False) -> tuple[Replay, Replay]:
        """The first or last rank of both pipelines, with that many layers."""
        shallow, deep = self.depths
        few, more = (
            extrapolate(
                pipeline[is_last, shallow], pipeline[is_last, deep], self.depths, layers
            )
            for pipeline in self._pipelines
        )
        return few, more

    def memory(
        self, layers: int, in_flight: float, is_last: bool = False
    ) -> tuple[MemoryPrediction, float]:
        """Memory with ``in_flight`` micro-batches, and the number of receive buffers that it
        includes."""
        few, more = self.pair(layers, is_last)
        if is_last and not self.all_at_once:  # one is in flight in both
            one, all_of_first = (
                self.memory(layers, number)[0].peak_bytes for number in (1, in_flight)
            )
            return _changed(
                few.memory(), {Category.activations: all_of_first - one}
            ), self.counts[0]
        received = self.counts[0] + in_flight - self.in_flight[0]
        return extrapolate(few, more, self.in_flight, in_flight).memory(), received

    def time(self, layers: int, is_last: bool = False) -> TimePrediction:
        """A step without waits for other ranks."""
        few, more = (replay.time() for replay in self.pair(layers, is_last))
        return extrapolate(few, more, self.counts, self.count)

    def seconds(self, layers: int, is_last: bool = False) -> float:
        """Time of a micro-batch, without waits for the host, which goes on while a rank waits for
        others."""
        few, more = (replay.time() for replay in self.pair(layers, is_last))
        return (
            more.step_seconds
            - more.host_seconds
            - (few.step_seconds - few.host_seconds)
        )


def predict_pipeline(
    config: Config, replays: Replays, depths: tuple[int, int]
) -> tuple[MemoryPrediction, TimePrediction, tuple[StagePrediction, ...]]:
    """Memory of the rank that reserves most, time of the busiest, and both of every rank; arguments
    as ``_Traced``."""
    assert isinstance(config.parallel, FSDP2Config)
    ranks = config.mesh.pp_size
    count = config.train.grad_accum
    schedule = config.parallel.schedule
    keeps_logits = schedule is PipelineSchedule.zero_bubble
    schedule = PipelineSchedule.interleaved if keeps_logits else schedule
    traced = _Traced(replays, depths, schedule, count)
    stages = stages_of(config)
    orders = [list(order_of(schedule, ranks, rank, count)) for rank in range(ranks)]
    table = _table(traced.memory(0, 1)[0], config.parallel)
    no_layers = traced.time(0)
    message_bytes = _message_bytes(config)
    memories = []
    times = []
    for rank, order in enumerate(orders):
        own = stages[rank::ranks]
        layers = sum(stage.size for stage in own)
        is_last = rank == ranks - 1
        memory, received = traced.memory(
            layers, most_in_flight(order, stages) / layers, is_last
        )
        time = traced.time(layers, is_last)
        # Every message of a step has a buffer of its own.
        messages = count * sum(
            (not stage.embeds) + (not stage.predicts) for stage in own
        )
        changes = {
            Category.exchange_buffers: round((messages - received) * message_bytes)
        }
        if 0 < rank < ranks - 1:
            changes |= {category: -size for category, size in table.items()}
            time = _without(time, no_layers)
        if keeps_logits and is_last and not config.memory.chunk_loss:
            changes |= {Category.logits: (count - 1) * _logit_bytes(config)}
        memories.append(_changed(memory, changes))
        times.append(time)
    seconds = _stage_seconds(config, traced, stages)
    makespan = duration(orders, seconds)
    waits = [
        makespan - sum(map(sum, seconds[rank::ranks])) * count for rank in range(ranks)
    ]
    busiest = waits.index(min(waits))
    wait = waits[busiest]
    time = times[busiest]
    on_device = time.step_seconds - time.host_seconds + wait
    step = max(on_device, *(other.step_seconds for other in times))
    time = dataclasses.replace(
        time, step_seconds=step, stage_seconds=wait, host_seconds=step - on_device
    )
    parts = [
        StagePrediction(
            name, memory.peak_bytes, memory.reserved_bytes, own.compute_seconds, wait
        )
        for name, memory, own, wait in zip(
            layers_of_ranks(config), memories, times, waits, strict=True
        )
    ]
    return max(memories, key=lambda memory: memory.reserved_bytes), time, tuple(parts)


def layers_of_ranks(config: Config) -> list[str]:
    """Layers of each rank of a pipeline, such as ``0-3, 8-11``."""
    names = [
        f"{stage.first}-{stage.end - 1}" if stage.size > 1 else str(stage.first)
        for stage in stages_of(config)
    ]
    return [
        ", ".join(names[rank :: config.mesh.pp_size])
        for rank in range(config.mesh.pp_size)
    ]


def stages_of(config: Config) -> list[Stage]:
    """Return the stages of a pipeline. Rank r of N has stages r, r + N, ...."""
    assert isinstance(config.parallel, FSDP2Config)
    with torch.device("meta"):
        model = config.model.build()
    return split_model(
        model,
        config.mesh.pp_size * config.parallel.schedule.stages_per_rank,
        config.train.seq_len,
    )


def _table(memory: MemoryPrediction, parallel: FSDP2Config) -> dict[Category, int]:
    """What an embedding adds to a rank, from the memory of a first rank without layers."""
    sizes = {category: memory.categories.get(category, 0) for category in OF_TABLE}
    # Its full gradients are as many as its gathered parameters, and add up in the dtype of
    # reductions.
    wider = parallel.reduce_dtype.torch.itemsize / parallel.param_dtype.torch.itemsize
    return sizes | {
        Category.reduction_buffers: round(sizes[Category.gathered_parameters] * wider)
    }


def _message_bytes(config: Config) -> int:
    """Hidden states of a micro-batch, of this rank's tokens."""
    tokens = (
        config.train.batch_size
        * config.train.seq_len
        // (config.mesh.cp_size * config.mesh.tp_size)
    )
    return tokens * config.model.dim * config.parallel.param_dtype.torch.itemsize


def _logit_bytes(config: Config) -> int:
    """Logits of a micro-batch, of this rank's tokens and features."""
    return _message_bytes(config) // config.model.dim * config.model.vocab_size


def _stage_seconds(
    config: Config, traced: _Traced, stages: Sequence[Stage]
) -> list[list[float]]:
    """By stage: seconds of a micro-batch's forward, and of its backward, which has twice the
    matmuls."""
    shallow, deep = traced.depths
    of_layer = (traced.seconds(deep) - traced.seconds(shallow)) / (deep - shallow)
    share = (
        1 / 4
        if config.memory.gradient_checkpointing is GradientCheckpointing.full
        else 1 / 3
    )
    seconds = [
        [of_layer * stage.size * share, of_layer * stage.size * (1 - share)]
        for stage in stages
    ]
    # A chunked loss has its gradients in the forward.
    chunked = config.memory.chunk_loss
    for stage, forward in ((0, 1 / 3), (-1, 1.0 if chunked else 1 / 3)):
        edge = traced.seconds(0, is_last=stage == -1)
        seconds[stage] = [
            seconds[stage][0] + edge * forward,
            seconds[stage][1] + edge * (1 - forward),
        ]
    return seconds


def _without(time: TimePrediction, part: TimePrediction) -> TimePrediction:
    """Time without the computations of a part, an embedding's."""
    kinds = {
        kind: max(0.0, seconds - part.kinds.get(kind, 0.0))
        for kind, seconds in time.kinds.items()
    }
    gone = time.compute_seconds - sum(kinds.values())
    return dataclasses.replace(
        time,
        step_seconds=time.step_seconds - gone,
        compute_seconds=sum(kinds.values()),
        kinds=kinds,
    )


def _changed(memory: MemoryPrediction, by: dict[Category, int]) -> MemoryPrediction:
    """Memory with more or less of some categories; one that a line has made negative is taken from
    activations."""
    more = sum(by.values())
    kinds = dict.fromkeys([*memory.categories, *by, Category.activations])
    categories = {
        category: max(0, memory.categories.get(category, 0) + by.get(category, 0))
        for category in kinds
    }
    peak = memory.peak_bytes + more
    categories[Category.activations] += peak - sum(categories.values())
    return dataclasses.replace(
        memory,
        end_bytes=memory.end_bytes + sum(by.get(category, 0) for category in LASTING),
        peak_bytes=peak,
        reserved_bytes=memory.reserved_bytes + more,
        categories=categories,
    )
