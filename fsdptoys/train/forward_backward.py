"""Forward and backward of a step's micro-batches, one after another or through the stages of a
pipeline."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from fsdptoys.parallel import Strategy
from fsdptoys.parallel.pipeline import Step

from .gradient_scale import StepScale
from .moe_balance import RoutingBalance
from .step_data import StepInputs


def forward_backward(
    strategy: Strategy,
    routing: RoutingBalance | None,
    inputs: StepInputs,
    scale: StepScale,
    begin: Callable[[int], None],
    enter: Callable[[str], None],
) -> Tensor:
    """Add up gradients, and return the sum of the losses of this rank's valid tokens. A collective.

    Args:
        strategy: of the model.
        routing: of its routers; None without experts.
        inputs: of this rank.
        scale: of the losses.
        begin: called with the number of each micro-batch before its forward.
        enter: called with ``forward`` and ``backward`` as these begin; a pipeline has both in one
            phase.
    """
    microbatches = inputs.microbatches
    loss_sum = strategy.world.zero()
    if strategy.pipelined is not None:
        enter("forward")
        if routing:
            routing.before_forward(strategy.full_model, 0, microbatches)
        around = routing.around_stage if routing else lambda modules: nullcontext()
        strategy.pipelined.train_step(
            Step(microbatches, scale.loss_fn, scale.per_token, around, loss_sum)
        )
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
