"""Each rank updates a slice, and an all-gather exchanges them."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def sharded_adam_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """Padded to equal slices."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = -(-len(parameter) // ranks)
    padding = length * ranks - len(parameter)
    own = pad(parameter, (0, padding)).view(ranks, length)[rank].clone()
    grad = pad(gradient, (0, padding)).view(ranks, length)[rank]
    if not state:
        state.update(mean=torch.zeros_like(own), square=torch.zeros_like(own))
    state["mean"].lerp_(grad, 1 - betas[0])
    state["square"].lerp_(grad * grad, 1 - betas[1])
    mean, square = state["mean"] / (1 - betas[0] ** step), state["square"] / (1 - betas[1] ** step)
    own -= lr * mean / (square.sqrt() + eps)
    updated = own.new_empty(length * ranks)
    dist.all_gather_into_tensor(updated, own)
    parameter.copy_(updated[: len(parameter)])
