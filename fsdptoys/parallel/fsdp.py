"""Settings that FSDP1, FSDP2 and the toy FSDP share.

ZeRO-3 (arXiv:1910.02054): every rank keeps 1/N of parameters, gradients and optimizer states. A
unit's parameters are all-gathered before its forward and again before its backward; its gradients
are reduce-scattered after the backward.
"""

import functools
from dataclasses import dataclass
from enum import Enum

import torch

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.options import Effect, Stage, option
from fsdptoys.utils.text import value_text
from fsdptoys.utils.uncached import Uncached

from .capabilities import TORCH as TORCH
from .config import ReducingConfig
from .precision import DType
from .wrap import (
    Unit,
    check_float32_modules,
    class_units,
    position_units,
    size_units,
    split_off_experts,
    split_off_float32,
)


class Wrap(Enum):
    """Which modules become units."""

    auto = "auto"
    """Those of ``wrap_classes`` or ``min_params`` if set, else ``block``."""
    block = "block"
    """Each block."""
    block_attn_mlp = "block_attn_mlp"
    """Attention and feed-forward of each block by themselves: less memory at a time, more
    collectives."""


class ReshardAfterForward(Enum):
    """Which units free their gathered parameters after the forward."""

    default = "default"
    """All but the last unit, which the backward needs first."""
    always = "always"
    never = "never"
    """None: ZeRO-2; parameters stay gathered until the backward."""


@dataclass
class FSDPConfig(ReducingConfig):
    """Sharded parameters, gradients and optimizer states."""

    wrap: Wrap = option(Wrap.auto, effect=Effect.rounding, acts=Stage.gradient)
    """Which modules become units."""
    wrap_classes: list[str] = option([], effect=Effect.rounding, acts=Stage.gradient)
    """Make every module of these classes a unit instead, for example [Attention,SwiGLU]; the root
    holds the rest."""
    min_params: float | None = option(
        None,
        at_least(1, 10**15),
        effect=Effect.rounding,
        acts=Stage.gradient,
        alias="fsdp_min_num_params min_num_params size_based_auto_wrap_policy",
    )
    """Make modules with at least this many parameters outside inner units a unit instead; the root
    holds the rest."""
    reshard_after_forward: ReshardAfterForward = option(
        ReshardAfterForward.default,
        effect=Effect.none,
        alias="fsdp_reshard_after_forward",
    )
    """Which units free their gathered parameters after the forward."""
    forward_prefetch: int = option(0, at_least(0, 10**6), effect=Effect.none)
    """Units gathered ahead of the one that computes, in the forward; 0 lets the device's queue do
    it."""
    backward_prefetch: int = option(1, at_least(0, 10**6), effect=Effect.none)
    """Units gathered ahead of the one that computes, in the backward."""
    reduce_each_microbatch: bool = option(
        False, effect=Effect.rounding, needs="train.grad_accum"
    )
    """Reduce gradients after each micro-batch, and keep only their shard between them; more
    communication."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = {
            "wrap": None if self.wrap is Wrap.auto else self.wrap,
            "wrap_classes": self.wrap_classes or None,
            "min_params": self.min_params,
        }
        overrides = [
            f"parallel.{key}={_text(value)}"
            for key, value in keys.items()
            if value is not None
        ]
        if len(overrides) > 1:
            off = (
                "parallel.wrap=auto"
                if keys["wrap"] is not None
                else "parallel.min_params=null"
            )
            raise ConfigError(
                f"{overrides[0]} and {overrides[1]} both choose the units; set {off} to keep the "
                "other"
            )
        if not overrides:
            self.wrap = Wrap.block

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduced after each micro-batch."""
        return self.reduce_each_microbatch

    def units(self, model: DecoderModel, splits_experts: bool = False) -> list[Unit]:
        """Units of a model in the order of their forwards, without the root, which holds all other
        parameters.

        Args:
            model: on any device.
            splits_experts: whether experts are sharded over other ranks than the rest, so that no
                unit has both.

        Raises:
            ConfigError: if ``wrap_classes`` names a class that no unit can have.
        """
        units = self._chosen_units(model)
        if self.param_dtype is not DType.float32 and model.float32_modules:
            units = split_off_float32(model, units)
        return split_off_experts(model, units) if splits_experts else units

    def _chosen_units(self, model: DecoderModel) -> list[Unit]:
        if self.wrap_classes:
            return class_units(model, self.wrap_classes)
        if self.min_params is not None:
            return size_units(model, self.min_params)
        parts = model.parts if self.wrap is Wrap.block_attn_mlp else ()
        return position_units(
            model, parts, groups=not self.capabilities.flattens_parameters
        )

    def reshards(self, unit: Unit | None) -> bool:
        """Whether a unit, or the root (None), frees its parameters after the forward."""
        policy = self.reshard_after_forward
        if unit is None or unit.ends_forward:
            return policy is ReshardAfterForward.always
        return policy is not ReshardAfterForward.never

    def hooks_parts_of_blocks(self, model: ModelConfig) -> bool:
        """Whether parts of a block are units."""
        if self.wrap is not Wrap.auto and not (
            self.param_dtype is not DType.float32
            and model.capabilities.has_float32_modules
        ):
            return self.wrap is Wrap.block_attn_mlp
        meta_model = _on_meta(repr(model), Uncached(model))
        names = [name for unit in self.units(meta_model) for name in unit.modules]
        prefix = f"{meta_model.blocks_name}."
        return any(
            name.startswith(prefix) and name.count(".") > prefix.count(".")
            for name in names
        )

    def check_model(self, model: ModelConfig) -> None:
        """Check that the model has the classes of ``wrap_classes``, and units of one dtype."""
        self.hooks_parts_of_blocks(model)
        if (
            self.param_dtype is not DType.float32
            and model.capabilities.has_float32_modules
        ):
            meta_model = _on_meta(repr(model), Uncached(model))
            check_float32_modules(meta_model, self.name, self.param_dtype.value)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else value_text(value)


@functools.lru_cache(maxsize=4)
def _on_meta(key: str, config: Uncached[ModelConfig]) -> DecoderModel:
    with torch.device("meta"):
        model: DecoderModel = config.value.build()
    return model
