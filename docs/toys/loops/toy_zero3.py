"""ZeRO-3 in a loop of your own: an optimizer over the tensors that this rank owns."""

import torch
from torch import nn

from fsdptoys.toys.optim import AdamW
from fsdptoys.toys.zero3 import Zero3


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    zero = Zero3(model, list(model.blocks), torch.device("cpu"))
    optimizer = AdamW([param for _, param in zero.owned()], lr=1e-2)
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(zero(inputs), targets)
        loss.backward()  # leaves the averages at their owners
        optimizer.step()  # nothing is sent: the next forward broadcasts the updated tensors
        optimizer.zero_grad()
        losses.append(loss.item())
    for unit in zero.units:
        zero.gather(unit)
    return losses, [param.detach() for param in model.parameters()]
