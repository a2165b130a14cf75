"""Loss of a model over batches.

Shapes: B sequences of a micro-batch, T tokens of each.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models.layers import LossFn


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
    loss_sum, valid = zero.clone(), zero.clone()
    for tokens_BT, labels_BT in batches:
        loss_sum += model(tokens_BT.to(device), labels_BT.to(device), loss_fn).to(
            zero.device
        )
        valid += int((labels_BT != IGNORE_INDEX).sum())
    return loss_sum, valid


def held_out_loss(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[tuple[Tensor, Tensor]],
    zero: Tensor,
    shares: int = 1,
) -> float:
    """Mean loss over all ranks' batches, in nats per token, with arguments as for ``sum_losses``. A
    collective.

    ``shares``: ranks that share each sequence: each computes the loss of its part, and counts all
    labels.
    """
    model.eval()
    loss_sum, valid = sum_losses(model, loss_fn, batches, zero.device, zero)
    dist.all_reduce(loss_sum)
    dist.all_reduce(valid)
    model.train()
    return loss_sum.item() / max(1.0, valid.item() / shares)
