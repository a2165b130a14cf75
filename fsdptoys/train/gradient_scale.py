"""The factors between a loss and its gradient: the one place that multiplies or divides either.

The gradient of a step is that of the mean loss over all valid tokens of the global batch:

    the backward starts from  a micro-batch's summed loss · factor / valid tokens
    collectives divide by     ``strategy.gradient_divisor``
    those of experts by       ``strategy.expert_gradient_divisor``
    clipping multiplies by    ``unscale`` = divisor / factor

``factor`` is the divisor itself, so that ``unscale`` is 1; in float16 it is the loss scale instead.
Where experts are divided by fewer ranks than other parameters, their backward divides by the rest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.loss import LossFn, OwnLoss, Vocabulary, build_loss
from fsdptoys.loss.objective import Objective
from fsdptoys.optim.loss_scale import LossScaler, nearest_power_of_two
from fsdptoys.parallel import Strategy

from .step_data import StepInputs


class StepScale(NamedTuple):
    """Factors of one step."""

    loss_fn: LossFn
    """Sums the loss over valid labels."""
    per_token: Tensor
    """Factor on that sum before the backward: float32, on the device."""
    factor: float
    """Factor on the mean loss over the valid tokens."""
    unscale: float
    """Factor on reduced gradients that makes them those of the mean loss."""
    tokens: int
    """Tokens in the global batch, with or without labels."""


class GradientScale:
    """Scales the losses of a run, and says what its gradients are multiplied by.

    Args:
        config: of the run.
        strategy: of the model, which has been sharded.
    """

    def __init__(self, config: Config, strategy: Strategy) -> None:
        needs_scale = config.parallel.param_dtype.needs_loss_scale
        self.scaler = LossScaler(config.loss_scale) if needs_scale else None
        """Finds the loss scale; None for dtypes that need none."""
        self._divisor = strategy.gradient_divisor
        of_experts = strategy.expert_gradient_divisor
        if of_experts != self._divisor:
            strategy.divide_expert_gradients(self._divisor // of_experts)
        self._zero = strategy.world.zero()
        self._data_ranks = strategy.world.world_size // strategy.mesh_axes.pp
        self._objective = Objective(
            config.train.label_smoothing, config.train.z_loss_coef
        )
        self._build_plain_loss = _loss_builder(config, strategy)
        own = OwnLoss.of(config.loss)
        self._build_loss = functools.partial(self._build_plain_loss, own=own)
        self.has_own_loss = own is not None
        """Whether a user's loss takes the place of the cross entropy."""
        self.loss_fn = self._build_loss(objective=self._objective)
        """Sums the loss over valid labels, unless a loss scale changes from step to step."""

    @property
    def loss_scale(self) -> float | None:
        """Return the loss scale of the next step; None for dtypes that need none."""
        return self.scaler.scale if self.scaler else None

    def plain_loss(self) -> LossFn:
        """Return the loss of evaluations: the cross entropy, summed over valid labels."""
        return self._build_plain_loss()

    def of(self, inputs: StepInputs, tokens: int) -> StepScale:
        """Return the factors of a step.

        Args:
            inputs: with counts of the global batch, which stay on the device.
            tokens: in the global batch, with or without labels.
        """
        loss_fn = self.loss_fn
        factor = float(self._divisor)
        if self.scaler:
            microbatches = len(inputs.microbatches)
            factor = self.scaler.loss_factor(microbatches * self._data_ranks)
            # Valid tokens are known on the device only; there are at most as many as tokens.
            gradient_scale = nearest_power_of_two(factor / tokens)
            objective = dataclasses.replace(
                self._objective, gradient_scale=gradient_scale
            )
            loss_fn = self._build_loss(objective=objective)
        # Not ``factor / valid``, which multiplies by a rounded reciprocal.
        per_token = torch.div(
            torch.full_like(self._zero, factor), inputs.counts[0].clamp(min=1)
        ).float()
        return StepScale(loss_fn, per_token, factor, self._divisor / factor, tokens)


def _loss_builder(config: Config, strategy: Strategy) -> Callable[..., LossFn]:
    """Return ``build_loss`` with the settings of a run, except for the objective or a user's
    loss."""
    memory = config.memory
    group = strategy.tensor_group
    return functools.partial(
        build_loss,
        memory.chunk_loss,
        None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens),
        memory.chunk_grad_dtype.torch,
        grain=config.train.grain_tokens,
        vocabulary=Vocabulary(group)
        if group is not None or config.train.slices > 1
        else None,
        slices=config.train.slices // strategy.mesh_axes.tp,
        dtype=config.parallel.param_dtype.torch,
    )
