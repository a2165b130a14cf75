"""Effect of each setting on losses: another training, other rounding, or none.

Layouts and memory switches change at most the order of summation (``docs/bit_equality.md``;
``docs/memory.md``). So runs that differ only in these should have the same losses: a difference larger than rounding is
a bug.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from fsdptoys.data import DataConfig

from .setting_diff import RANKS, Settings, effective

GLOBAL_BATCH = "sequences of a step"
"""Pseudo-key for the number of sequences that all ranks and micro-batches take, which selects the samples of a step."""


class Effect(IntEnum):
    """Largest effect of changing a setting, strongest first."""

    training = 0  # Other losses: another model, data or optimizer
    format = 1  # Another dtype: losses are close, within its rounding
    rounding = 2  # Another order of summation or kernel: the last bits
    none = 3  # Bitwise equal losses


class Stage(IntEnum):
    """Stage of a step in which a setting first acts."""

    forward = 0  # Shows in the loss of the first step
    gradient = 1  # Shows in the gradient of the first step, not in its loss
    update = 2  # Shows in the second step


FORMATS = (
    "parallel.param_dtype",
    "parallel.buffer_dtype",
    "loss_scale.initial",
    "loss_scale.growth_factor",
    "loss_scale.backoff_factor",
    "loss_scale.growth_interval",
    "memory.chunk_grad_dtype",
    "memory.offload_state_dtype",
    "train.float8",
    "train.float8_all_gather",
)

USUAL_FORMATS: Settings = {
    "loss_scale.initial": 65536.0,
    "loss_scale.growth_factor": 2.0,
    "loss_scale.backoff_factor": 0.5,
    "loss_scale.growth_interval": 2000,
    "memory.chunk_grad_dtype": "float32",
    "memory.offload_state_dtype": "float32",
    "train.float8": "none",
    "train.float8_all_gather": False,
}
"""Values that apply if the switch of a format is off."""

ROUNDING = (
    RANKS,
    "mesh.fsdp_size",
    "mesh.cp_size",
    "mesh.ep_size",
    "mesh.tp_size",
    "mesh.pp_size",
    "parallel.name",
    "parallel.context",
    "parallel.schedule",
    "parallel.simulated_ranks",
    "parallel.reduce_dtype",
    "parallel.reduce_each_microbatch",
    "train.batch_size",
    "train.grad_accum",
    "train.deterministic",
    "train.grains",
    "train.slices",
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
"""Includes the layout, which matters by default; with ``train.deterministic=true`` layouts are bitwise equal, and with
``layout`` micro-batches too."""

NEUTRAL_SECTIONS = ("memory", "parallel", "mesh", "checkpoint", "metrics", "profile", "debug", "launch", "plan")
"""Sections whose settings change no bit, unless listed above."""

NEUTRAL = (
    "model.name",
    "train.seed",  # contained in init_seed, data_seed and sample_seed
    "train.sample_seed",
    "train.max_seconds",
    "train.eval_every",
    "train.eval_batches",
    "train.gc_every",
    "train.max_skipped",
    "train.max_skipped_in_a_row",
    *(f"data.{name}" for name in DataConfig.neutral),
)

GRADIENT = (
    "parallel.reduce_dtype",
    "loss_scale.initial",
    "memory.chunk_grad_dtype",
    "model.router_aux_loss_coef",
    "model.router_z_loss_coef",
)
UPDATE = (
    "loss_scale.growth_factor",
    "loss_scale.backoff_factor",
    "loss_scale.growth_interval",
    "train.max_grad_norm",
    "train.steps",
    "train.skip_nonfinite",
    "memory.cpu_offload",
    "memory.offload_state_dtype",
)


SHARING = ("mesh.cp_size", "mesh.tp_size", "mesh.pp_size")
"""Ranks that compute parts of the same sequences."""


BATCH = (RANKS, "train.batch_size", "train.grad_accum", "parallel.simulated_ranks", *SHARING)
"""Settings whose product, divided by ``SHARING``, is the number of sequences of a step."""


AXES = ("mesh.ep_size", *SHARING)
"""Ranks that compute parts of the same sequences or layers."""


def effect_of(key: str, same_batch: bool = True) -> Effect:
    """Largest effect of changing a setting on losses, for runs with or without the same number of sequences a step."""
    if key in BATCH and not same_batch:
        return Effect.training
    if key in FORMATS:
        return Effect.format
    if key in ROUNDING:
        return Effect.rounding
    if key in NEUTRAL or key.partition(".")[0] in NEUTRAL_SECTIONS:
        return Effect.none
    return Effect.training


def stage_of(key: str) -> Stage:
    """Stage of a step in which a setting first acts."""
    if key in UPDATE or key.startswith("optim."):
        return Stage.update
    return Stage.gradient if key in GRADIENT else Stage.forward


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Sequences of a step over all ranks and micro-batches; None if a setting is missing."""
    parts = [settings.get(key) for key in ("train.batch_size", "train.grad_accum")]
    return _product([*parts, _data_ranks(settings), settings.get("parallel.simulated_ranks", 1)])


def _data_ranks(settings: Mapping[str, Any]) -> int | None:
    """Groups of ranks with sequences of their own; None if a setting is missing or makes no sense."""
    ranks, shared = settings.get(RANKS), [settings.get(key, 1) for key in SHARING]
    if type(ranks) is not int or not all(type(size) is int and size > 0 for size in shared):
        return None
    return ranks // math.prod(shared)


def training_of(tree: dict[str, Any], world_size: int) -> Settings | None:
    """Settings (of ``config.yaml``) that determine losses up to rounding; runs that share them should agree.

    None if a setting needed for the global batch is missing.
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
        kept.pop("train.steps", None)  # the learning rate does not depend on the last step
    if settings.get("model.router_aux_loss_coef"):
        # Expert loads are balanced over the micro-batches so far (arXiv:2501.11873).
        kept["train.grad_accum"] = settings["train.grad_accum"]
    return kept


def rounds_coarsely(settings: Mapping[str, Any]) -> bool:
    """Whether numbers have 16 bits, or one bit can change a float8 value or the routing of a token."""
    formats = (settings.get(key) for key in (*FORMATS, "parallel.reduce_dtype"))
    has_16_bits = not {"bfloat16", "float16"}.isdisjoint(formats)
    return "model.n_experts" in settings or has_16_bits or settings.get("train.float8", "none") != "none"


def held_out_samples(tree: dict[str, Any], world_size: int) -> tuple[Any, Any] | None:
    """Key equal for runs that evaluate the same held-out samples; None if settings are missing."""
    settings = effective(tree)
    ranks = _data_ranks({RANKS: world_size} | settings)
    asked = _product([settings.get("train.eval_batches"), settings.get("train.batch_size"), ranks])
    return None if asked is None else (asked, settings.get("data.eval_samples"))


def bits_of(tree: dict[str, Any], world_size: int, device_type: str) -> Settings | None:
    """Settings that, with :func:`training_of`, determine every bit of a deterministic run; None for other runs.

    ``memory.cpu_offload`` is left out on CPU devices, where the optimizer runs on the host anyway.
    """
    # Ranks that share sequences add up each sequence in parts, in an order of their own.
    absent = {**dict.fromkeys(AXES, 1), "parallel.context": "auto", "parallel.schedule": "gpipe"}
    settings = {RANKS: world_size} | absent | effective(tree)
    ranks = _product([_data_ranks(settings), settings.get("parallel.simulated_ranks", 1)])
    mode = settings.get("train.deterministic")
    if mode == "layout":
        ranks = 0  # any, with any micro-batches: only the global batch counts, which ``training_of`` has
    if mode not in (True, "layout") or ranks is None or ranks & (ranks - 1):
        return None  # only a power of two divides without rounding
    left_out = {"mesh.fsdp_size", "parallel.name", "parallel.simulated_ranks", "memory.cpu_threads", "patches"}
    left_out |= {"parallel.reduce_dtype", "train.sum_dtype"}  # set by the deterministic mode and the device
    left_out |= {"memory.cpu_offload"} if device_type == "cpu" else set()
    by_grains = {"train.batch_size", "train.grad_accum", *AXES, "parallel.context", "parallel.schedule"}
    left_out |= by_grains if mode == "layout" else {"train.grains", "train.slices"}
    return {key: settings.get(key) for key in ROUNDING if key not in left_out} | {RANKS: ranks}


def _product(parts: Sequence[Any]) -> int | None:
    return math.prod(parts) if all(type(part) is int for part in parts) else None
