"""Advice: the predicted effect of changing single switches, or pairs of them."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.models import MoEConfig
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType

from .combinations import OFFLOADS, REDUCES_OFTEN
from .switches import Changes, overrides_between, read, validate_switches, vary

MAX_ADVICE = 5
WORTHWHILE = 0.02  # Smallest reported gain in tokens per second


@dataclass(frozen=True)
class Advice:
    """A change and its predicted effect."""

    overrides: tuple[str, ...]  # To append to the command line
    reserved_bytes: float  # After the change
    tokens_per_second: float  # After the change
    reserved_change_bytes: int
    speed_change: float  # Relative to the present tokens per second
    fits: bool


def advise(
    config: Config,
    predict: Callable[[Config], Prediction],
    prediction: Prediction,
    memory_bytes: float,
    node_ranks: int = 8,
) -> list[Advice]:
    """Find changes that make a run fit, or make it faster, the best first; if no two suffice, those
    that save most.

    Args:
        config: as composed; if validated, changes of resolved ``auto`` values are included.
        predict: predicts a validated configuration, as ``fast_estimate`` does.
        prediction: that of ``config``.
        memory_bytes: usable memory of a device.
    """
    world_size = prediction.world_size
    fits = prediction.memory.reserved_bytes <= memory_bytes

    def evaluate(changes: Changes) -> Advice | None:
        try:
            varied = vary(config, changes)
            overrides = overrides_between(config, varied)
            if not overrides:
                return None
            validate_switches(varied, world_size, prediction.device_type, node_ranks)
            after = predict(varied)
        except ConfigError:
            return None
        reserved = after.memory.reserved_bytes
        saved = reserved - prediction.memory.reserved_bytes
        ratio = after.tokens_per_second / prediction.tokens_per_second
        speed = prediction.tokens_per_second * ratio
        return Advice(
            tuple(overrides),
            reserved,
            speed,
            saved,
            ratio - 1,
            reserved <= memory_bytes,
        )

    changes_of_one = list(_changes(config, world_size, node_ranks))
    if prediction.device_type == "cpu":  # everything is in host memory already
        changes_of_one = [
            changes
            for changes in changes_of_one
            if not any("offload" in key for key in changes)
        ]
    if fits:
        changes_of_one = [
            changes for changes in changes_of_one if not _only_saves(config, changes)
        ]
    alone = [(changes, evaluate(changes)) for changes in changes_of_one]
    advice = [one for _, one in alone if one is not None]
    if fits:
        return _fastest(
            one for one in advice if one.fits and one.speed_change >= WORTHWHILE
        )
    savers = [
        changes
        for changes, one in alone
        if one is not None and one.reserved_change_bytes < 0
    ]
    pairs = [
        one | other
        for one, other in itertools.combinations(savers, 2)
        if not one.keys() & other.keys()
    ]
    enough = [one for one in advice if one.fits]
    gain = max((one.tokens_per_second for one in enough), default=0.0) * (
        1 + WORTHWHILE
    )
    advice += [one for one in map(evaluate, pairs) if one is not None]
    enough += [one for one in advice if one.fits and one.tokens_per_second >= gain]
    if enough:
        return _fastest(dict.fromkeys(enough))
    return sorted(advice, key=lambda one: one.reserved_bytes)[:MAX_ADVICE]


def _only_saves(config: Config, changes: Changes) -> bool:
    """Whether a change saves memory and never time: it moves what is now on the device, or gathers
    more often."""
    if changes.get("parallel.reshard_after_forward") is ReshardAfterForward.always:
        return True
    return any(map(changes.get, OFFLOADS)) and not any(
        read(config, key) for key in OFFLOADS
    )


def _fastest(advice: Iterable[Advice]) -> list[Advice]:
    return sorted(advice, key=lambda one: (-one.tokens_per_second, len(one.overrides)))[
        :MAX_ADVICE
    ]


def _changes(
    config: Config, world_size: int, node_ranks: int
) -> Iterator[dict[str, Any]]:
    """All changes of one switch."""
    memory = config.memory
    parallel = config.parallel
    batch = config.train.batch_size
    can = parallel.capabilities
    alternatives: list[dict[str, Any]] = [
        {"memory.chunk_loss": not memory.chunk_loss},
        *({"memory.gradient_checkpointing": mode} for mode in GradientCheckpointing),
        {"memory.activation_offload": not memory.activation_offload},
        {
            "memory.optimizer_offload": not memory.optimizer_offload,
            "memory.cpu_offload": False,
        },
        {
            "memory.cpu_offload": not memory.cpu_offload,
            "memory.optimizer_offload": False,
        },
        {"parallel.param_dtype": DType.bfloat16},
        *({"train.batch_size": size} for size in (2 * batch, 4 * batch)),
        *(
            {"train.batch_size": batch >> halvings}
            for halvings in range(1, batch.bit_length())
        ),
    ]
    if memory.cpu_offload or can.overlapped_cpu_offload:
        overlapped = {"memory.cpu_offload_executor": CPUOffloadExecutor.overlapped}
        alternatives.append(
            {
                "memory.cpu_offload": True,
                **overlapped,
                "memory.optimizer_offload": False,
            }
        )
    if memory.checkpoints:
        alternatives.append(
            {"memory.checkpointing_every": 2 if memory.checkpointing_every == 1 else 1}
        )
    if can.shards_parameters:
        alternatives += [
            {"parallel.wrap": wrap} for wrap in (Wrap.block, Wrap.block_attn_mlp)
        ]
        alternatives += [
            {"parallel.reshard_after_forward": reshard}
            for reshard in ReshardAfterForward
        ]
        sizes = (
            (-1, node_ranks)
            if node_ranks < config.mesh.stage_ranks(world_size)
            else (-1,)
        )
        alternatives += [{"mesh.fsdp_size": size} for size in sizes]
        alternatives += [{REDUCES_OFTEN: not parallel.reduces_often}]
    axes: dict[str, int] = {}
    if can.context_forms and batch == 1:
        axes["mesh.cp_size"] = config.mesh.cp_size
    if can.splits_experts and isinstance(config.model, MoEConfig):
        axes["mesh.ep_size"] = config.mesh.ep_size
    if can.splits_features:
        axes["mesh.tp_size"] = config.mesh.tp_size
    for key, size in axes.items():
        alternatives += [
            {key: other}
            for other in (2 * size, max(1, size // 2))
            if world_size % other == 0
        ]
    if world_size > 1:
        alternatives.append({"parallel": "fsdp2"})
    for changes in alternatives:
        if any(read(config, key) != value for key, value in changes.items()):
            yield changes
