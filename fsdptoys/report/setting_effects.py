"""Effect of each setting on losses: another training, other rounding, or none.

Layouts and memory switches change at most the order of summation (``docs/bit_equality.md``;
``docs/memory.md``). So runs that differ only in these should have the same losses: a difference
larger than rounding is a bug.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdptoys.config.declared_options import declared_options, option_defaults
from fsdptoys.register import live_cache
from fsdptoys.utils.options import Declared, Effect, Stage

from .setting_diff import RANKS, Settings, effective

GLOBAL_BATCH = "sequences of a step"
"""Pseudo-key for the number of sequences that all ranks and micro-batches take, which selects the
samples of a step."""


PSEUDO = {
    RANKS: Declared(Effect.rounding),
    "parallel.name": Declared(Effect.rounding),
    "patches": Declared(Effect.rounding),
    "model.name": Declared(Effect.none),
    "model.router_aux_loss_coef": Declared(Effect.training, Stage.gradient),
    "model.router_z_loss_coef": Declared(Effect.training, Stage.gradient),
    "loss.name": Declared(Effect.training),
    "optim.name": Declared(Effect.training, Stage.update),
}
"""What no section declares: keys of ``config.yaml`` that are no options, and the model's, of which
most act at once."""


SHARING = ("mesh.cp_size", "mesh.tp_size", "mesh.pp_size")
"""Ranks that compute parts of the same sequences."""


BATCH = (
    RANKS,
    "train.batch_size",
    "train.grad_accum",
    "parallel.simulated_ranks",
    *SHARING,
)
"""Settings whose product, divided by ``SHARING``, is the number of sequences of a step."""


AXES = ("mesh.ep_size", *SHARING)
"""Ranks that compute parts of the same sequences or layers."""


@live_cache
def declared() -> dict[str, Declared]:
    """Return key → declaration. Layouts change the last bits, except in the deterministic modes."""
    return declared_options() | PSEUDO


@live_cache
def usual_formats() -> Settings:
    """Return the values that apply if the switch of a format is off, or an older run has none."""
    defaults = option_defaults()
    return {
        key: defaults[key]
        for key, option in declared_options().items()
        if option.effect is Effect.format
    }


def effect_of(key: str, same_batch: bool = True) -> Effect:
    """Largest effect of changing a setting on losses, for runs with or without the same number of
    sequences a step."""
    if key in BATCH and not same_batch:
        return Effect.training
    return declared().get(key, Declared(Effect.training)).effect


def stage_of(key: str) -> Stage:
    """Stage of a step in which a setting first acts."""
    return declared().get(key, Declared(Effect.training)).acts


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Sequences of a step over all ranks and micro-batches; None if a setting is missing."""
    parts = [settings.get(key) for key in ("train.batch_size", "train.grad_accum")]
    return _product(
        [*parts, _data_ranks(settings), settings.get("parallel.simulated_ranks", 1)]
    )


def _data_ranks(settings: Mapping[str, Any]) -> int | None:
    """Groups of ranks with sequences of their own; None if a setting is missing or makes no
    sense."""
    ranks = settings.get(RANKS)
    shared = [settings.get(key, 1) for key in SHARING]
    if type(ranks) is not int or not all(
        type(size) is int and size > 0 for size in shared
    ):
        return None
    return ranks // math.prod(shared)


def training_of(tree: dict[str, Any], world_size: int) -> Settings | None:
    """Settings (of ``config.yaml``) that determine losses up to rounding; runs that share them
    should agree.

    None if a setting needed for the global batch is missing.
    """
    settings = {RANKS: world_size} | effective(tree)
    batch = global_batch(settings)
    if batch is None:
        return None
    training: Settings = {
        key: value for key, value in settings.items() if effect_of(key) <= Effect.format
    }
    training[GLOBAL_BATCH] = batch
    training["parallel.reduce_dtype"] = (
        "bfloat16"
        if settings.get("parallel.reduce_dtype") == "bfloat16"
        else "at least 32 bits"
    )
    training = usual_formats() | training
    if settings.get("optim.schedule") == "constant":
        # The learning rate does not depend on the last step
        training.pop("train.steps", None)
    if settings.get("model.router_aux_loss_coef"):
        # Expert loads are balanced over the micro-batches so far (arXiv:2501.11873).
        training["train.grad_accum"] = settings["train.grad_accum"]
    return training


def _having(effect: Effect) -> list[str]:
    return [key for key, option in declared().items() if option.effect is effect]


def rounds_coarsely(settings: Mapping[str, Any]) -> bool:
    """Whether numbers have 16 bits, or one bit can change a float8 value or the routing of a
    token."""
    formats = (
        settings.get(key) for key in (*_having(Effect.format), "parallel.reduce_dtype")
    )
    has_16_bits = not {"bfloat16", "float16"}.isdisjoint(formats)
    return (
        "model.n_experts" in settings
        or has_16_bits
        or settings.get("train.float8", "none") != "none"
    )


def held_out_samples(tree: dict[str, Any], world_size: int) -> tuple[Any, Any] | None:
    """Key equal for runs that evaluate the same held-out samples; None if settings are missing."""
    settings = effective(tree)
    ranks = _data_ranks({RANKS: world_size} | settings)
    samples = _product(
        [settings.get("train.eval_batches"), settings.get("train.batch_size"), ranks]
    )
    return None if samples is None else (samples, settings.get("data.eval_samples"))


def bits_of(tree: dict[str, Any], world_size: int, device_type: str) -> Settings | None:
    """Settings that, with :func:`training_of`, determine every bit of a deterministic run; None for
    other runs.

    ``memory.cpu_offload`` is left out on CPU devices: the optimizer runs on the host anyway.
    """
    # Ranks that share sequences add up each sequence in parts, in an order of their own.
    absent = {
        **dict.fromkeys(AXES, 1),
        "parallel.context": "auto",
        "parallel.schedule": "gpipe",
    }
    settings = {RANKS: world_size} | absent | effective(tree)
    ranks = _product(
        [_data_ranks(settings), settings.get("parallel.simulated_ranks", 1)]
    )
    mode = settings.get("train.deterministic")
    if mode == "layout":
        # any, with any micro-batches: only the global batch counts, which ``training_of`` has
        ranks = 0
    if mode not in (True, "layout") or ranks is None or ranks & (ranks - 1):
        return None  # only a power of two divides without rounding
    left_out = {
        "mesh.fsdp_size",
        "parallel.name",
        "parallel.simulated_ranks",
        "memory.cpu_threads",
        "patches",
    }
    # set by the deterministic mode and the device
    left_out |= {
        "parallel.reduce_dtype",
        "train.sum_dtype",
    }
    left_out |= {"memory.cpu_offload"} if device_type == "cpu" else set()
    # Which elements a collective adds together; float64 sums do not depend on it.
    left_out |= {
        "parallel.bucket_cap_mb",
        "parallel.evenness",
        "parallel.min_params",
        "parallel.wrap",
        "parallel.wrap_classes",
    }
    by_grains = {
        "train.batch_size",
        "train.grad_accum",
        *AXES,
        "parallel.context",
        "parallel.schedule",
    }
    left_out |= by_grains if mode == "layout" else {"train.grains", "train.slices"}
    return {
        key: settings.get(key)
        for key in _having(Effect.rounding)
        if key not in left_out
    } | {RANKS: ranks}


def _product(parts: Sequence[Any]) -> int | None:
    return math.prod(parts) if all(type(part) is int for part in parts) else None
