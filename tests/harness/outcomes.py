"""Results of training runs that are compared bit for bit, by tests and by ``scripts/parity.py``."""

import hashlib
from dataclasses import dataclass

import torch

from fsdptoys.config.schema import Config
from fsdptoys.train.trainer import Trainer


@dataclass
class Outcome:
    """Results of a training run to compare."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, str]
    """Name → hash of the full parameter."""


def train_all(configs: list[Config]) -> list[Outcome]:
    """Train the configurations one after another on the ranks that this one belongs to."""
    outcomes = []
    for config in configs:
        trainer = Trainer(config)
        # compared nowhere, and a tenth of the time of short runs
        trainer.memory.enabled = False
        trainer.train()
        outcomes.append(outcome_of(trainer))
    return outcomes


def outcome_of(trainer: Trainer) -> Outcome:
    """Losses, norms and parameters of a trainer so far."""
    return Outcome(
        losses=[step.loss for step in trainer.history],
        grad_norms=[step.grad_norm for step in trainer.history],
        parameters=hash_parameters(trainer),
    )


def hash_parameters(trainer: Trainer) -> dict[str, str]:
    """Name → SHA-256 over the bytes of the full parameter."""
    hashes: dict[str, str] = {}
    for name, param in trainer.strategy.full_parameters():
        assert name not in hashes, "a parameter came twice"
        hashes[name] = hashlib.sha256(
            param.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return hashes
