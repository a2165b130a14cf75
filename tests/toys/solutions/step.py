"""Each rank updates a slice, and an all-gather exchanges them."""

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fsdptoys.toys.optim import adamw_update


def sharded_adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Padded to equal slices."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = -(-len(parameter) // ranks)
    padding = length * ranks - len(parameter)
    own = pad(parameter, (0, padding)).view(ranks, length)[rank].clone()
    grad = pad(gradient, (0, padding)).view(ranks, length)[rank]
    adamw_update(own, grad, state, step, lr, betas, eps, weight_decay)
    updated = own.new_empty(length * ranks)
    dist.all_gather_into_tensor(updated, own)
    parameter.copy_(updated[: len(parameter)])
