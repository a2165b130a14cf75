"""Numbers of runs that equal one process's up to rounding."""

import dataclasses
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.models.moe import Router
from fsdptoys.optim import SGDConfig
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.fsdp1 import FSDP1
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import full_tensor, is_dtensor
from tests.harness.outcomes import hash_parameters
from tests.harness.tiny import make_config


def initial_hashes(configs: list[Config]) -> list[dict[str, str]]:
    """Hashes of each run's parameters before its first step."""
    return [hash_parameters(Trainer(config)) for config in configs]


def only_the_first(self: Router, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
    """A router that routes every token to expert 0 and still has a gradient."""
    probabilities_NE = torch.nn.functional.linear(hidden_ND, self.weight).softmax(-1)
    experts_N1 = torch.zeros(len(hidden_ND), 1, dtype=torch.int64)
    sums = torch.cat([probabilities_NE.sum(0), torch.zeros(1)])
    self._remember(experts_N1, sums.detach())
    return experts_N1, probabilities_NE[:, :1]


SGD = SGDConfig(lr=0.1)
"""Keeps the rounding of gradients small in parameters; AdamW's first steps divide small ones by
themselves."""


@dataclasses.dataclass
class Outcome:
    """Numbers of a run: of all steps, of the first step's gradients before clipping, and of the
    final parameters."""

    losses: list[float]
    """Of the steps, and then of the evaluations."""
    norms: list[float]
    balance: list[float]
    grads: dict[str, numpy.ndarray]
    parameters: dict[str, numpy.ndarray]


def train(config: Config) -> Outcome:
    trainer = Trainer(config)
    trainer.memory.enabled = False
    grads: dict[str, numpy.ndarray] = {}
    clip = trainer.stepper.clip

    def keep_and_clip(*args: Any) -> torch.Tensor:
        if trainer.steps_done == 0:
            grads.update(full_gradients(trainer))
        return clip(*args)

    trainer.stepper.clip = keep_and_clip  # type: ignore[method-assign]
    trainer.train()
    history = trainer.history
    return Outcome(
        losses=[step.loss for step in history]
        + [step.eval_loss for step in history if step.eval_loss is not None],
        norms=[step.grad_norm for step in history],
        balance=[step.routing.aux_loss for step in history if step.routing],
        grads=grads,
        parameters={
            name: param.numpy().copy()
            for name, param in trainer.strategy.full_parameters()
        },
    )


def full_gradients(trainer: Trainer) -> dict[str, numpy.ndarray]:
    strategy = trainer.strategy
    if isinstance(strategy, FSDP1):
        with strategy.model.summon_full_params(strategy.model, with_grads=True):
            return {
                name: param.grad.numpy().copy()
                for name, param in strategy.named_parameters()
                if param.grad is not None
            }
    full: dict[str, Tensor] = {}
    for name, param in strategy.named_parameters():
        if param.grad is not None:
            grad = strategy.spread(name, param.grad)
            full[name] = full_tensor(grad) if is_dtensor(grad) else grad
    if strategy.pipeline is not None:
        full = dict(strategy.pipeline.share_parameters(iter(full.items())))
    return {name: grad.numpy().copy() for name, grad in full.items()}


def train_all(configs: list[Config]) -> list[Outcome] | None:
    outcomes = [train(config) for config in configs]
    return outcomes if dist.get_rank() == 0 else None  # all ranks have the same


def split(world_size: int, ep_size: int, **options: Any) -> Config:
    parallel = options.pop("parallel", FSDP2Config())
    options = {"optim": SGD, "steps": 2, "deterministic": False, **options}
    return make_config(parallel, world_size, ep_size=ep_size, **options)


def distance(one: numpy.ndarray, other: numpy.ndarray) -> float:
    norm = float(numpy.linalg.norm(other))
    return (
        float(numpy.linalg.norm(one - other)) / norm
        if norm
        else float(numpy.abs(one).max())
    )


def assert_close(
    outcome: Outcome,
    expected: Outcome,
    tolerance: float = 2e-6,
    norm_tolerance: float | None = None,
    tensors: bool = True,
) -> None:
    """Compare numbers of steps, and unless told otherwise gradients and parameters."""
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert outcome.norms == pytest.approx(
        expected.norms, rel=norm_tolerance or tolerance
    )
    if not tensors:
        return
    assert outcome.balance == pytest.approx(expected.balance, rel=tolerance)
    for arrays, references in (
        (outcome.grads, expected.grads),
        (outcome.parameters, expected.parameters),
    ):
        assert arrays.keys() == references.keys()
        far = {name: distance(arrays[name], references[name]) for name in references}
        assert {name: far[name] for name in far if far[name] > tolerance} == {}
