"""Results of training runs that are compared bit for bit, by tests and by ``scripts/parity.py``."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from fsdptoys.config.schema import Config
from fsdptoys.train.trainer import Trainer
from scripts.common.progress import unit


@dataclass
class Outcome:
    """Results of a training run to compare."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, str]
    """Name → hash of the full parameter."""


def train_all(configs: list[Config], titles: Sequence[str] = ()) -> list[Outcome]:
    """Train every row on the ranks that this one belongs to; rows with titles are announced as they finish."""
    outcomes = []
    for config, title in zip_longest(configs, titles, fillvalue=""):
        with unit(title, announce=bool(title) and dist.get_rank() == 0):
            trainer = Trainer(config)
            trainer.memory.enabled = False  # compared nowhere, and a tenth of the time of short runs
            trainer.train()
            outcomes.append(
                Outcome(
                    losses=[step.loss for step in trainer.history],
                    grad_norms=[step.grad_norm for step in trainer.history],
                    parameters=hash_parameters(trainer),
                )
            )
    return outcomes


def hash_parameters(trainer: Trainer) -> dict[str, str]:
    """Name → SHA-256 over the bytes of the full parameter."""
    hashes: dict[str, str] = {}
    for name, param in trainer.strategy.full_parameters():
        assert name not in hashes, "a parameter came twice"
        hashes[name] = hashlib.sha256(param.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashes
