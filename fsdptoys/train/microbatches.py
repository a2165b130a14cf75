"""Forward and backward of a step's micro-batches, one after another or through the stages of a pipeline."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch import Tensor

from fsdptoys.models.layers import LossFn
from fsdptoys.parallel import Strategy
from fsdptoys.parallel.pipeline import Step

from .moe_balance import RoutingBalance


def run_microbatches(
    strategy: Strategy,
    routing: RoutingBalance | None,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: LossFn,
    per_token: Tensor,
    begin: Callable[[int], None],
    enter: Callable[[str], None],
    loss_sum: Tensor,
) -> None:
    """Add up gradients, and the losses of this rank's valid tokens. A collective.

    Args:
        strategy: of the model.
        routing: of its routers, in a step that has begun; None without experts.
        microbatches: (tokens_BT, labels_BT) of each.
        loss_fn: sums the loss over valid labels.
        per_token: factor on the loss before the backward.
        begin: called with the number of each micro-batch before its forward.
        enter: called with ``forward`` and ``backward`` as these begin; a pipeline has both in one phase.
        loss_sum: scalar to which losses are added.
    """
    if strategy.pipelined is not None:
        enter("forward")
        if routing:
            routing.before_forward(strategy.full_model, 0, microbatches)
        around = routing.around_stage if routing else lambda modules: nullcontext()
        strategy.pipelined.train_step(Step(microbatches, loss_fn, per_token, around, loss_sum))
        return
    for index, (tokens_BT, labels_BT) in enumerate(microbatches):
        if routing:
            routing.before_forward(strategy.full_model, index, microbatches, begin)
        begin(index)
        with strategy.microbatch(index, len(microbatches)):
            enter("forward")
            loss = strategy.model(tokens_BT, labels_BT, loss_fn)
            if routing:
                routing.before_backward()
            enter("backward")
            (loss * per_token).backward()
        loss_sum += loss.detach()
