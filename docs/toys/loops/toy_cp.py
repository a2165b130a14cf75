"""Context parallelism in a loop of your own: every rank has the whole model and a part of every
sequence."""

import torch.distributed as dist
from torch import nn

from fsdptoys.toys.cp import ContextParallel
from fsdptoys.toys.optim import AdamW


def train(model, batches):
    """Take a step for each batch of whole sequences; return the losses and the parameters."""
    parallel = ContextParallel(model, dist.group.WORLD, kind="ring")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, labels in batches:  # the same on all ranks
        own_labels, _ = parallel.cut(labels)
        logits = parallel(tokens)
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum")
            / labels.numel()
        )
        loss.backward()
        parallel.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
