"""Forward and backward of a step's micro-batches, one after another or through the stages of a
pipeline."""

import functools
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from fsdptoys.parallel.pipeline import Step

from .gradient_scale import StepScale
from .parallelize import ParallelModel
from .step_data import StepInputs
from .tuning import show_samples


def forward_backward(
    parallel_model: ParallelModel,
    inputs: StepInputs,
    scale: StepScale,
    enter: Callable[[str], None],
) -> Tensor:
    """Add up gradients, and return the sum of the losses of this rank's valid tokens. A collective.

    Args:
        parallel_model: the model.
        inputs: of this rank.
        scale: of the losses.
        enter: called with ``forward`` and ``backward`` as these begin; a pipeline has both in one
            phase.
    """
    strategy = parallel_model.strategy
    routing = parallel_model.routing
    microbatches = inputs.microbatches
    loss_sum = strategy.world.zero()
    begin = functools.partial(show_samples, parallel_model.samples, inputs.samples)
    if routing:
        routing.begin_step(scale.tokens, scale.factor)
    if strategy.pipelined is not None:
        enter("forward")
        if routing:
            routing.before_forward(strategy.full_model, 0, microbatches)
        around = routing.around_stage if routing else lambda modules: nullcontext()
        step = Step(microbatches, scale.loss_fn, scale.per_token, around, loss_sum)
        strategy.pipelined.train_step(step)
        return loss_sum
    for index, (tokens_BT, labels_BT) in enumerate(microbatches):
        if routing:
            routing.before_forward(strategy.full_model, index, microbatches, begin)
        begin(index)
        with strategy.microbatch(index, len(microbatches)):
            enter("forward")
            loss = strategy.model(tokens_BT, labels_BT, scale.loss_fn)
            if routing:
                routing.before_backward()
            enter("backward")
            (loss * scale.per_token).backward()
        loss_sum += loss.detach()
    return loss_sum
