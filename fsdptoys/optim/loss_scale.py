"""Dynamic loss scaling, without which gradients underflow in float16: ``torch.amp.GradScaler``'s
schedule on all ranks.

float16 ends at 65504 and has no numbers below 6e-8, where many gradients of activations are. The
backward therefore starts from a loss multiplied by a scale, and the reduced float32 gradients are
divided by it before they are measured and clipped. A step in which a gradient of any rank overflows
is skipped and lowers the scale; ``growth_interval`` steps in a row without one raise it.

The ranks decide by the norm of the reduced gradients, summed with the loss and read on the host
once a step, before the update. In other dtypes an accelerator's numbers may be read a step later;
here the next step needs the scale.

The scale multiplies the mean over one micro-batch, not over the global batch, whose gradients
shrink with its size. The number of micro-batches is rounded to a power of two, since only these are
exact in float16. Neither depends on how ranks and ``train.grad_accum`` share the global batch, so
neither do the bits.

Source: arXiv:1710.03740; https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

from fsdptoys.utils.bounds import MOST_STEPS, above, at_least, open_between
from fsdptoys.utils.options import Effect, Stage, check_options, option

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32; GradScaler would fall to 0, by which nothing can be divided."""


@dataclass
class LossScaleConfig:
    """Loss scale of ``parallel.param_dtype=float16``; the defaults are those of
    ``torch.amp.GradScaler``."""

    initial: float = option(
        65536.0,
        above(0, 2.0**100),
        effect=Effect.format,
        acts=Stage.gradient,
        needs="parallel.param_dtype=float16",
        alias="init_scale initial_loss_scale",
    )
    """Loss scale of the first step."""
    growth_factor: float = option(
        2.0,
        above(1, 2.0**20),
        effect=Effect.format,
        acts=Stage.update,
        needs="parallel.param_dtype=float16",
    )
    """Factor on the scale after ``growth_interval`` steps without an overflow."""
    backoff_factor: float = option(
        0.5,
        open_between(0, 1),
        effect=Effect.format,
        acts=Stage.update,
        needs="parallel.param_dtype=float16",
    )
    """Factor on the scale after an overflow."""
    growth_interval: int = option(
        2000,
        at_least(1, MOST_STEPS),
        effect=Effect.format,
        acts=Stage.update,
        needs="parallel.param_dtype=float16",
        alias="loss_scale_window scale_growth_interval growth_interval",
    )
    """Consecutive steps without an overflow before the scale grows."""

    def __post_init__(self) -> None:
        check_options("loss_scale", self)


class LossScaler:
    """The loss scale of a run, with the same bits as ``torch.amp.GradScaler``'s after the same
    overflows."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.scale = _float32(config.initial)
        self._steps_without_overflow = 0

    @property
    def can_help(self) -> bool:
        """Whether a lower scale may avoid an overflow: below 1 it would scale gradients down."""
        return self.scale > 1

    def loss_factor(self, microbatches: int) -> float:
        """Factor on the mean loss of a global batch of ``microbatches`` micro-batches, those of all
        ranks."""
        return self.scale * nearest_power_of_two(microbatches)

    def update(self, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        config = self._config
        if overflowed:
            self.scale = max(
                _float32(self.scale * config.backoff_factor), SMALLEST_SCALE
            )
            self._steps_without_overflow = 0
            return
        self._steps_without_overflow += 1
        if self._steps_without_overflow >= config.growth_interval:
            grown = _float32(self.scale * config.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self._steps_without_overflow = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and count, as JSON values."""
        return {
            "scale": self.scale,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.scale = state["scale"]
        self._steps_without_overflow = state["steps_without_overflow"]


def nearest_power_of_two(value: float) -> float:
    """The power of two nearest to a positive number, by their logarithms."""
    return 2.0 ** round(math.log2(value))


def _float32(value: float) -> float:
    """Round as GradScaler does, which keeps the scale in a float32 tensor."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
