"""The toy FSDP in a loop of your own: each block is a unit, the rest of the model another."""

from torch import nn

from fsdptoys.toys.fsdp import fully_shard
from fsdptoys.toys.optim import AdamW


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)  # after sharding: these are shards
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # leaves shards of the averages in the shards' gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.full_tensor().detach() for param in model.parameters()]
