"""Loss of a model over batches.

Shapes: B sequences of a micro-batch, T tokens of each.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models.layers import LossFn
from fsdptoys.parallel import Strategy


@torch.no_grad()
def sum_losses(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    zero: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses over batches, in nats, and number of valid labels.

    Args:
        model: in evaluation mode, on ``device``.
        loss_fn: sums the loss over valid labels.
        batches: (tokens_BT, labels_BT) of this rank; if the model is sharded, every rank needs the
            same number.
        zero: scalar of the results' device and dtype.
    """
    loss_sum = zero.clone()
    valid = zero.clone()
    for tokens_BT, labels_BT in batches:
        loss_sum += model(tokens_BT.to(device), labels_BT.to(device), loss_fn).to(
            zero.device
        )
        valid += int((labels_BT != IGNORE_INDEX).sum())
    return loss_sum, valid


def held_out_losses(
    strategy: Strategy,
    loss_fns: Sequence[Callable[..., Tensor]],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> list[float]:
    """Mean losses over all ranks' batches, in nats per token. A collective.

    Args:
        strategy: of the model.
        loss_fns: each sums a loss over valid labels; one forward computes all of them.
        batches: (tokens_BT, labels_BT) of this rank; every rank needs the same number.
    """
    zero = strategy.world.zero()
    model = strategy.full_model
    model.eval()
    first, *others = loss_fns
    more = [zero.clone() for _ in others]

    def loss_fn(*inputs: Tensor, **head: Any) -> Tensor:
        for loss_sum, other in zip(more, others, strict=True):
            loss_sum += other(*inputs, **head).to(zero.device)
        return first(*inputs, **head)

    first_sum, valid = sum_losses(model, loss_fn, batches, zero.device, zero)
    sums = [first_sum, *more]
    for total in (*sums, valid):
        dist.all_reduce(total)
    model.train()
    # Ranks that share a sequence compute the loss of their part, and count all of its labels.
    axes = strategy.mesh_axes
    count = max(1.0, valid.item() / (axes.pp * axes.sharing))
    return [total.item() / count for total in sums]
