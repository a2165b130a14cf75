"""ZeRO-2 in a loop of your own: as ZeRO-1, with gradients that no rank keeps whole."""

from torch import nn

from fsdptoys.toys.optim import AdamW
from fsdptoys.toys.zero2 import Zero2


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    zero = Zero2(model)
    optimizer = AdamW(zero.pieces(), lr=1e-2)
    zero.attach(optimizer)
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(zero(inputs), targets)
        loss.backward()  # leaves slices of the averages in the pieces' gradients
        optimizer.step()  # updates the pieces and exchanges them
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
