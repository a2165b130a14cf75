"""ZeRO-1 in a loop of your own: an optimizer over this rank's pieces, attached to the exchange of
updates."""

from torch import nn

from fsdptoys.toys.optim import AdamW
from fsdptoys.toys.zero1 import Zero1


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    zero = Zero1(model)
    optimizer = AdamW(zero.pieces(), lr=1e-2)
    zero.attach(optimizer)
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(zero(inputs), targets)
        loss.backward()  # averages gradients on the way
        optimizer.step()  # updates the pieces, exchanges them, drops all gradients
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
