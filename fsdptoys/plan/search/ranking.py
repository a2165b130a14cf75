"""Predicted candidates: their order and the Pareto front of memory and speed."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.memory import CPUOffloadExecutor
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.mesh import CONTEXT_AXIS, EXPERT_AXIS, PIPE_AXIS, TENSOR_AXIS
from fsdptoys.utils.text import value_text

from .switches import STRATEGIES, Changes


def label(config: Config) -> str:
    """Short name of a combination: ``fsdp2/8 b4 full chunk``; the number after the slash is
    ``mesh.fsdp_size``."""
    return " ".join([f"{layout(config)} b{config.train.batch_size}", *traits(config)])


def layout(config: Config) -> str:
    """The strategy, the size of its shard axis if less than all ranks, and those of the axes cp,
    ep, tp and pp."""
    mesh = config.mesh
    size = f"/{mesh.fsdp_size}" if mesh.fsdp_size != -1 else ""
    axes = (
        (CONTEXT_AXIS, mesh.cp_size),
        (EXPERT_AXIS, mesh.ep_size),
        (TENSOR_AXIS, mesh.tp_size),
        (PIPE_AXIS, mesh.pp_size),
    )
    return " ".join(
        [
            config.parallel.name + size,
            *(f"{name}{ranks}" for name, ranks in axes if ranks > 1),
        ]
    )


def traits(config: Config) -> list[str]:
    """Short names of the active switches."""
    memory = config.memory
    parallel = config.parallel
    names = []
    if config.mesh.pp_size > 1 and isinstance(parallel, FSDP2Config):
        names.append(parallel.schedule.value)
    if (
        config.mesh.cp_size > 1
        and (form := getattr(parallel, "context", ContextForm.ulysses))
        is not ContextForm.ulysses
    ):
        names.append(form.value)
    if memory.checkpoints:
        every = (
            f"/{memory.checkpointing_every}" if memory.checkpointing_every > 1 else ""
        )
        names.append(
            memory.gradient_checkpointing.value
            + every
            + "+offload" * memory.activation_offload
        )
    if memory.chunk_loss:
        names.append("chunk")
    if memory.optimizer_offload:
        names.append("opt-offload")
    if memory.cpu_offload:
        names.append(
            "cpu-offload"
            + "+overlapped"
            * (memory.cpu_offload_executor is CPUOffloadExecutor.overlapped)
        )
    for name, plain in (("wrap", "block"), ("reshard_after_forward", "default")):
        value = value_text(getattr(parallel, name, plain))
        if value != plain:
            names.append({"block_attn_mlp": "attn-mlp"}.get(value, f"reshard-{value}"))
    return names


TIE = 0.01  # Relative difference in tokens per second that counts as a tie


@dataclass(frozen=True)
class Candidate:
    """A predicted combination."""

    # All overrides that compose it: the command line's without ``plan.*``, and the changes
    overrides: tuple[str, ...]
    config: Config  # Validated; its section ``plan`` is as composed
    prediction: Prediction
    # Number of sharding and memory settings that differ from their defaults
    switches: int
    # Changed switches, without the batch
    changes: Changes = field(default_factory=dict)
    position: int = 0  # In the ranking; tied candidates share it

    @property
    def reserved_bytes(self) -> int:
        """Reserved device memory of a rank."""
        return self.prediction.memory.reserved_bytes

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.prediction.tokens_per_second


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no other equals or beats in both memory and speed, smallest memory first; the
    first of equals."""
    points = [(one.reserved_bytes, -one.tokens_per_second) for one in candidates]
    return [candidates[index] for index in pareto_front(points)]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points that no other equals or undercuts in both coordinates, by the first; the
    first of equals."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        if not best or points[index][1] < points[best[-1]][1]:
            best.append(index)
    return best


def rank(candidates: Collection[Candidate]) -> list[Candidate]:
    """The fastest candidate and its ties, fewer switches first; then the next fastest and its ties,
    and so on.

    Of candidates with equal batch and prediction only the first one is kept.
    """
    rest = sorted(candidates, key=lambda candidate: -candidate.tokens_per_second)
    firsts: dict[Any, Candidate] = {}
    position = 0
    while rest:
        fastest = rest[0].tokens_per_second
        ties = [one for one in rest if one.tokens_per_second * (1 + TIE) >= fastest]
        position += 1
        for candidate in sorted(ties, key=_simplicity):
            memory = candidate.prediction.memory
            time = candidate.prediction.time
            sizes = (
                memory.end_bytes,
                memory.peak_bytes,
                memory.reserved_bytes,
                memory.host_bytes,
            )
            same = (candidate.config.train.batch_size, *sizes, time.step_seconds)
            firsts.setdefault(same, dataclasses.replace(candidate, position=position))
        rest = rest[len(ties) :]
    return list(firsts.values())


def _simplicity(candidate: Candidate) -> tuple[int, int, int]:
    return (
        candidate.switches,
        list(STRATEGIES).index(candidate.config.parallel.name),
        candidate.reserved_bytes,
    )
