"""Saves of a small checkpoint with one value in all parts."""

import torch

from fsdptoys.checkpoint import Checkpointer

KEEP = 2


def save(checkpoints: Checkpointer, step: int, value: float) -> bool:
    tensors = {
        "model.a": torch.full((3, 5), float(value)),
        "optim.a.step": torch.tensor(float(value)),
    }
    return checkpoints.save(step, tensors, {"value": value}, {"own": value})
