"""Expert parallelism in a loop of your own: every rank has half of the experts, and its own
sequences."""

import torch.distributed as dist
from torch import nn

from fsdptoys.toys.ep import Experts, make_groups, sum_gradients
from fsdptoys.toys.optim import AdamW


def train(model, batches):
    """Take a step on each rank's rows of each batch; return losses and parameters."""
    together, same = make_groups(dist.get_world_size())
    model.moe.experts = Experts(model.moe.experts.gate_up_LHD, model.moe.experts.down_LDF, together)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        tokens, labels = (rows.chunk(dist.get_world_size())[dist.get_rank()] for rows in batch)
        logits = model(tokens).flatten(0, 1)
        loss_sum = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        loss = loss_sum / batch[1].numel()
        loss.backward()
        sum_gradients(model, same)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
