"""The work that every peer does: weights, batches and their order, number of steps; and the line
printed per step.

Needs torch and numpy alone, so that it runs in the peers' own environment. Each step prints a line
on standard output; the caller reads the clock when the line arrives, the same way for all peers.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Work:
    """Model, data and length of a training."""

    weights: str
    """Folder in Hugging Face format; without weights in it ``values.draw`` draws them on the
    device."""
    batches: str
    """File of int32 with the shape (steps, ranks, 2, batch_size, seq_len): tokens, labels."""
    ranks: int
    batch_size: int
    seq_len: int
    steps: int
    dtype: str
    """``float32`` or ``bfloat16``."""
    device: str
    """``cpu`` or ``cuda``."""
    compiles: int = 0
    """1 to compile the blocks."""
    checkpoints: int = 0
    """1 to compute the blocks again in the backward."""
    half: int = 0
    """1 for parameters, gradients and optimizer states in bfloat16 too, where ``dtype`` is."""
    low_bits: int = 0
    """1 for torchao's AdamW with states of 8 bits, where the peer has it."""

    @property
    def bfloat16(self) -> bool:
        """Whether to compute in bf16."""
        return self.dtype == "bfloat16"

    def arguments(self) -> list[str]:
        """The command line that ``read_work`` reads."""
        return [
            f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items()
        ]

    def batches_of(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """tokens_BT and labels_BT of each step."""
        shape = (self.steps, self.ranks, 2, self.batch_size, self.seq_len)
        for tokens, labels in np.memmap(self.batches, np.int32, "r", shape=shape)[
            :, rank
        ]:
            yield tuple(
                torch.from_numpy(ids.astype(np.int64)).to(self.device)
                for ids in (tokens, labels)
            )


def read_work() -> Work:
    """The work that the command line asks for."""
    parser = argparse.ArgumentParser()
    for name, kind in Work.__annotations__.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(Work, name, None)
        )
    return Work(**vars(parser.parse_args()))


def decay_groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Parameter groups: matrices decay, norms do not."""
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


def tell_peak(device: str) -> None:
    """The highest sum of tensors on the device, unless it is a CPU."""
    if device != "cpu":
        print(f"peak {torch.cuda.max_memory_allocated()}", flush=True)


def tell_step(step: int, loss: float) -> None:
    """One line, at once."""
    print(f"step {step} loss {loss!r}", flush=True)
