"""A synchronization of your own: each module's gradients are averaged by themselves, while the
backward goes on."""

import torch
import torch.distributed as dist
from torch import nn

from fsdptoys.toys.autograd import queue_callback
from fsdptoys.toys.optim import AdamW


class Averaged:
    """Averages the gradients of each module over the ranks, in one fixed order."""

    def __init__(self, modules):
        self.units = [[p for p in module.parameters() if p.requires_grad] for module in modules]
        self.enabled = True
        self.in_flight = []
        self.missing = []
        """Parameters without a gradient in this backward, unit by unit; empty between backwards."""
        for number, unit in enumerate(self.units):
            for param in unit:
                param.register_post_accumulate_grad_hook(lambda p, n=number: self.on_gradient(n, p))

    def on_gradient(self, number, param):
        """Note a gradient; send the units that are complete, in their order."""
        if not self.enabled:
            return  # the gradients of micro-batches add up; the last one sends the sum
        if not self.missing:
            self.missing = [set(unit) for unit in self.units]
            queue_callback(self.finish)
        self.missing[number].remove(param)
        while len(self.in_flight) < len(self.units) and not self.missing[len(self.in_flight)]:
            self.send()

    def send(self):
        """All-reduce the next unit."""
        unit = self.units[len(self.in_flight)]
        parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1) for p in unit]
        flat = torch.cat(parts)
        flat /= dist.get_world_size()
        self.in_flight.append((unit, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        """Send the modules that this rank has not used, as others may have; wait for all."""
        while len(self.in_flight) < len(self.units):
            self.send()
        for unit, flat, work in self.in_flight:
            work.wait()
            means = flat.split([param.numel() for param in unit])
            for param, mean in zip(unit, means, strict=True):
                param.grad = mean.view_as(param)
        self.in_flight = []
        self.missing = []


def train(model, batches):
    """Take a step for each batch of this rank; return its losses and the parameters."""
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    Averaged([model.head, *reversed(model.blocks)])  # in the order of the backward
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]
