"""Training of transformers models by this project, and by a plain loop over transformers' own
classes."""

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.memory import MemoryConfig
from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign.json_text import config_text
from fsdptoys.optim import AdamWConfig, WeightDecayOn
from fsdptoys.optim.config import set_schedule
from fsdptoys.parallel import ParallelConfig, SingleConfig
from fsdptoys.train.trainer import Trainer
from tests.harness.foreign_families import tiny_config
from tests.harness.tiny import make_config

STEPS = 5
RANKS = 2
CLIP = 1.0
LEARNING_RATE = 1e-3
DECAY = 0.1
EPSILON = 1e-5
"""Large, so that rounding of gradients near zero does not decide the sign of an update."""


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm of each step."""

    losses: list[float]
    norms: list[float]

    def error(self, other: "Curve") -> float:
        """The largest relative difference; infinite if a number is not finite."""
        pairs = [
            *zip(self.losses, other.losses, strict=True),
            *zip(self.norms, other.norms, strict=True),
        ]
        errors = [abs(value - expected) / abs(expected) for value, expected in pairs]
        return max(error if error == error else float("inf") for error in errors)


def tiny_model(model_type: str, **settings: Any) -> TransformersConfig:
    """The settings of a tiny model of transformers."""
    text = config_text(tiny_config(model_type, **settings), "config.json")
    return TransformersConfig(name=model_type, config=text)


def foreign_config(
    model: TransformersConfig,
    parallel: ParallelConfig,
    ranks: int = RANKS,
    memory: MemoryConfig | None = None,
    **options: Any,
) -> Config:
    """A validated run of a few steps: one sequence a rank, some labels ignored."""
    train: dict[str, Any] = {
        "batch_size": 1,
        "seq_len": 32,
        "grad_accum": 1,
        "steps": STEPS,
        "max_grad_norm": CLIP,
        "deterministic": False,
    }
    return make_config(
        parallel,
        ranks,
        model=model,
        memory=memory,
        optim=AdamWConfig(
            lr=LEARNING_RATE,
            eps=EPSILON,
            weight_decay=DECAY,
            weight_decay_on=WeightDecayOn.all,
        ),
        data=SyntheticConfig(branching=4, ragged=True),
        **{**train, **options},
    )


def train(config: Config) -> Curve:
    """Train with this project; on every rank."""
    trainer = Trainer(config)
    trainer.train()
    return Curve(
        [step.loss for step in trainer.history],
        [step.grad_norm for step in trainer.history],
    )


def train_plainly(config: Config) -> Curve:
    """Train with transformers' own model and PyTorch's AdamW in one process.

    Args:
        config: of ``SingleConfig``; its trainer provides batches, initial values and learning
            rates, and takes no step.
    """
    trainer = Trainer(config)
    model = plain_causal_lm(trainer)
    options = trainer.optimizer.param_groups[0]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=options["betas"],
        eps=options["eps"],
        weight_decay=DECAY,
    )
    losses = []
    norms = []
    for step in range(1, config.train.steps + 1):
        optimizer.param_groups[0]["lr"] = options["lr"]
        batches = trainer.data.next_step(lambda seconds: seconds).microbatches
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        total = 0.0
        for tokens, labels in batches:
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(
                logits.float().flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
            (loss / valid).backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(total / valid)
        optimizer.step()
        optimizer.zero_grad()
        set_schedule(trainer.schedule, step)
    return Curve(losses, norms)


def plain_causal_lm(trainer: Trainer) -> Any:
    """transformers' model, constructed on the CPU, with the initial values of a trainer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = trainer.config.model
    assert isinstance(config, TransformersConfig)
    assert config.config is not None
    tree = json.loads(config.config)
    settings = CONFIG_MAPPING[tree["model_type"]].from_dict(tree)
    for key, value in vars(settings).items():
        if isinstance(value, float) and (
            "dropout" in key or "pdrop" in key or "jitter" in key
        ):
            setattr(settings, key, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    names = trainer.parallel_model.model.hugging_face_names
    with torch.no_grad():
        for name, param in trainer.strategy.full_parameters():
            model.get_parameter(names[name]).copy_(param)
    return model.train()


def curves(configs: Sequence[Config]) -> list[Curve | str]:
    """Train each configuration on every rank; a sentence in place of one that fails."""
    return [_attempt(functools.partial(train, config)) for config in configs]


def plain_curves(configs: Sequence[Config]) -> list[Curve | str]:
    """The plain loop of each configuration."""
    return [_attempt(functools.partial(train_plainly, config)) for config in configs]


def _attempt(run: Any) -> Curve | str:
    try:
        result: Curve = run()
    except Exception as error:  # of any kind: a table goes on
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return result


def single_config(model: TransformersConfig, ranks: int = RANKS) -> Config:
    """One process that runs the micro-batches of several ranks."""
    return foreign_config(model, SingleConfig(simulated_ranks=ranks), 1)


def errors(
    runs: Mapping[str, Curve | str], expected: Curve | str
) -> dict[str, float | str]:
    """Label → largest relative difference to a curve, or what failed."""
    return {
        label: run
        if isinstance(run, str)
        else expected
        if isinstance(expected, str)
        else run.error(expected)
        for label, run in runs.items()
    }
