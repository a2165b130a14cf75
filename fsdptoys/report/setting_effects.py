"""What a setting can do to losses: make it another training, round it otherwise, or nothing.

Layouts and memory switches change no more than the order in which numbers are added (``docs/architecture.md``, "Which
bits are equal"; ``docs/memory.md``), and most of them not even that. So runs that differ in nothing else should have
the same losses: a difference that rounding cannot explain is a mistake somewhere.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from .setting_diff import RANKS, Settings, effective

GLOBAL_BATCH = "sequences of a step"
"""Stands for ranks, micro-batches and batch size, whose product decides which samples a step sees."""


class Effect(IntEnum):
    """The most that another value of a setting does, the strongest first."""

    training = 0
    """Another model, other data, another update: other losses."""
    format = 1
    """Another number format: close losses, no closer than it rounds."""
    rounding = 2
    """Another order of adding, another kernel: the last bits."""
    none = 3
    """No bit."""


class Stage(IntEnum):
    """Where in a step a setting acts first."""

    forward = 0
    """The loss of the first step shows it."""
    gradient = 1
    """The first step's gradient shows it, its loss does not."""
    update = 2
    """The second step shows it."""


FORMATS = (
    "parallel.param_dtype",
    "parallel.buffer_dtype",
    "memory.chunk_grad_dtype",
    "memory.offload_state_dtype",
    "train.float8",
    "train.float8_all_gather",
)

USUAL_FORMATS: Settings = {
    "memory.chunk_grad_dtype": "float32",
    "memory.offload_state_dtype": "float32",
    "train.float8": "none",
    "train.float8_all_gather": False,
}
"""What a run without the switch of these formats computes in."""

ROUNDING = (
    RANKS,
    "mesh.fsdp_size",
    "parallel.name",
    "parallel.simulated_ranks",
    "parallel.reduce_dtype",
    "train.batch_size",
    "train.grad_accum",
    "train.deterministic",
    "train.sum_dtype",
    "train.compile",
    "optim.implementation",
    "memory.chunk_loss",
    "memory.chunk_tokens",
    "memory.checkpointing_budget",
    "memory.cpu_offload",
    "memory.cpu_threads",
    "patches",
    *(
        f"kernels.{operation}"
        for operation in ("attention", "document_attention", "rms_norm", "rotary", "swiglu", "grouped_matmul")
    ),
)
"""The layout is here for its default mode; ``train.deterministic=true`` makes all layouts equal."""

NEUTRAL_SECTIONS = ("memory", "parallel", "mesh", "checkpoint", "metrics", "profile", "debug", "launch", "plan")
"""What is not named here of these changes no bit."""

NEUTRAL = (
    "model.name",
    "train.seed",  # stands in init_seed, data_seed and sample_seed
    "train.sample_seed",
    "train.max_seconds",
    "train.eval_every",
    "train.eval_batches",
    "train.max_skipped",
    "train.max_skipped_in_a_row",
    "data.workers",
    "data.processes",
    "data.cache",
    "data.eval_samples",
    "data.sample_tokens",
    "data.sample_prompt",
    "data.sample_temperature",
)

GRADIENT = (
    "parallel.reduce_dtype",
    "memory.chunk_grad_dtype",
    "model.router_aux_loss_coef",
    "model.router_z_loss_coef",
)
UPDATE = (
    "train.max_grad_norm",
    "train.steps",
    "train.skip_nonfinite",
    "memory.cpu_offload",
    "memory.offload_state_dtype",
)


def effect_of(key: str, same_batch: bool = True) -> Effect:
    """The most that another value of a setting does to losses.

    Args:
        key: dotted.
        same_batch: whether a step of both has equally many sequences.
    """
    if key in (RANKS, "train.batch_size", "train.grad_accum", "parallel.simulated_ranks") and not same_batch:
        return Effect.training
    if key in FORMATS:
        return Effect.format
    if key in ROUNDING:
        return Effect.rounding
    if key in NEUTRAL or key.partition(".")[0] in NEUTRAL_SECTIONS:
        return Effect.none
    return Effect.training


def stage_of(key: str) -> Stage:
    """Where in a step a setting acts first."""
    if key in UPDATE or key.startswith("optim."):
        return Stage.update
    return Stage.gradient if key in GRADIENT else Stage.forward


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Sequences of a step over all ranks and micro-batches; None where a setting is not there."""
    parts = [settings.get(key) for key in (RANKS, "train.batch_size", "train.grad_accum")]
    return _product([*parts, settings.get("parallel.simulated_ranks", 1)])


def training_of(tree: dict[str, Any], world_size: int) -> Settings | None:
    """All settings that decide losses up to rounding; runs that share them should agree.

    Args:
        tree: of ``config.yaml``.
        world_size: ranks.

    Returns:
        None where settings are missing that every run has.
    """
    settings = {RANKS: world_size} | effective(tree)
    batch = global_batch(settings)
    if batch is None:
        return None
    kept: Settings = {key: value for key, value in settings.items() if effect_of(key) <= Effect.format}
    kept[GLOBAL_BATCH] = batch
    kept["parallel.reduce_dtype"] = (
        "bfloat16" if settings.get("parallel.reduce_dtype") == "bfloat16" else "at least 32 bits"
    )
    kept = USUAL_FORMATS | kept
    if settings.get("optim.schedule") == "constant":
        kept.pop("train.steps", None)  # the learning rate does not know the end
    if settings.get("model.router_aux_loss_coef"):
        # A backward balances by the micro-batches so far (arXiv:2501.11873).
        kept["train.grad_accum"] = settings["train.grad_accum"]
    return kept


def rounds_coarsely(settings: Mapping[str, Any]) -> bool:
    """Whether numbers of 16 bits are added up, or a last bit can become another float8, or a token go elsewhere."""
    formats = (settings.get(key) for key in (*FORMATS, "parallel.reduce_dtype"))
    return "model.n_experts" in settings or "bfloat16" in formats or settings.get("train.float8", "none") != "none"


def held_out_samples(tree: dict[str, Any], world_size: int) -> tuple[Any, Any] | None:
    """The same for runs whose held-out losses are over the same samples; None where settings are missing."""
    settings = effective(tree)
    asked = _product([settings.get("train.eval_batches"), settings.get("train.batch_size"), world_size])
    return None if asked is None else (asked, settings.get("data.eval_samples"))


def bits_of(tree: dict[str, Any], world_size: int, device_type: str) -> Settings | None:
    """What decides every bit under ``train.deterministic=true``; None for a run that promises none.

    Where the device is the host, an optimizer on the host is the one that the others have too.
    """
    settings = {RANKS: world_size} | effective(tree)
    ranks = _product([world_size, settings.get("parallel.simulated_ranks", 1)])
    if settings.get("train.deterministic") is not True or ranks is None or ranks & (ranks - 1):
        return None  # only a power of two divides without rounding
    keys = [
        key for key in ROUNDING if key not in (RANKS, "mesh.fsdp_size", "parallel.name", "parallel.simulated_ranks")
    ]
    kept = {key: settings.get(key) for key in keys if key not in ("memory.cpu_threads", "patches")}
    if device_type == "cpu":
        kept.pop("memory.cpu_offload", None)
    for decided in ("parallel.reduce_dtype", "train.sum_dtype"):  # by the deterministic mode and the device
        kept.pop(decided, None)
    return kept | {RANKS: ranks}


def _product(parts: Sequence[Any]) -> int | None:
    """Of whole numbers; None where one of them is none."""
    return math.prod(parts) if all(type(part) is int for part in parts) else None
