"""The toy DDP in a loop of your own: every rank has the whole model and its own batches."""

from torch import nn

from fsdptoys.toys.ddp import DDP
from fsdptoys.toys.optim import AdamW


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    ddp = DDP(model)
    optimizer = AdamW(ddp.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()  # averages gradients on the way
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
