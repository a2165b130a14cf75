"""Any module of own code, trained under every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim.config import set_schedule
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.train.trainer import Trainer
from tests.harness.foreign_runs import Curve, foreign_config, train
from tests.harness.levels import extended
from tests.harness.own_module import WIDTH, Own, OwnConfig
from tests.harness.ranks import run_ranks

SEED = 5


def own_config(
    parallel: ParallelConfig, ranks: int = 2, model: Any = None, **options: Any
) -> Config:
    config: Any = OwnConfig() if model is None else model
    return foreign_config(config, parallel, ranks, init_seed=SEED, **options)


def train_plainly(config: Config) -> Curve:
    """The module alone, as ``torch.manual_seed`` initializes it, in a plain loop."""
    assert isinstance(config.model, OwnConfig)
    trainer = Trainer(config)
    torch.manual_seed(SEED)
    model = Own(config.model.tied, config.model.cap)
    group = trainer.optimizer.param_groups[0]
    optimizer = torch.optim.AdamW(
        model.parameters(), group["lr"], group["betas"], group["eps"], 0.1
    )
    losses = []
    norms = []
    for step in range(1, config.train.steps + 1):
        optimizer.param_groups[0]["lr"] = group["lr"]
        batches = trainer.data.next_step(lambda seconds: seconds).microbatches
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        total = torch.zeros(())
        for tokens, labels in batches:
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / valid
            loss.backward()
            total += loss.detach()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
        set_schedule(trainer.schedule, step)
    return Curve(losses, norms)


FULL = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="16")
CASES: dict[str, tuple[ParallelConfig, int, OwnConfig, dict[str, Any]]] = {
    "single": (SingleConfig(simulated_ranks=2), 1, OwnConfig(), {}),
    "ddp": (DDPConfig(), 2, OwnConfig(), {}),
    "fsdp1": (FSDP1Config(), 2, OwnConfig(), {"memory": FULL}),
    "fsdp2": (FSDP2Config(), 2, OwnConfig(), {"memory": CHUNKED}),
    "fsdp2 without a head": (FSDP2Config(), 2, OwnConfig(has_head=False), {}),
    "fsdp2 with a cap": (FSDP2Config(), 2, OwnConfig(has_head=False, cap=0.3), {}),
    "fsdp1 with one weight": (FSDP1Config(), 2, OwnConfig(tied=True), {}),
    "fsdp2 with one weight": (FSDP2Config(), 2, OwnConfig(tied=True), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case if case in ("ddp", "fsdp1", "fsdp2") else extended(case) for case in CASES]
)  # fmt: skip
def test_any_module_trains_as_in_a_plain_loop(case: str) -> None:
    """Oracle: the module itself, AdamW and cross entropy; the same initial values."""
    parallel, ranks, model, options = CASES[case]
    config = own_config(parallel, ranks, model, **options)
    plain = own_config(SingleConfig(simulated_ranks=2), 1, model)
    expected = run_ranks(1, train_plainly, plain)[0]
    for curve in run_ranks(ranks, train, config):
        assert curve.error(expected) < 1e-5


def test_hsdp_trains_as_in_a_plain_loop() -> None:
    """Oracle: as above, with parameters sharded over two of four ranks."""
    config = own_config(FSDP2Config(), 4, fsdp_size=2)
    plain = own_config(SingleConfig(simulated_ranks=4), 1)
    expected = run_ranks(1, train_plainly, plain)[0]
    for curve in run_ranks(4, train, config):
        assert curve.error(expected) < 1e-5


class NoModule(OwnConfig):
    """Returns something else."""

    def build(self) -> Any:
        """Return a number."""
        return 3


class Normalized(OwnConfig):
    """Has batch normalization."""

    def build(self) -> nn.Module:
        """Return a module with a fault."""
        own = Own(False, None)
        own.extra = nn.BatchNorm1d(WIDTH)
        return own


class Loose(OwnConfig):
    """Has a tensor that is no buffer."""

    def build(self) -> nn.Module:
        """Return a module with a fault."""
        own = Own(False, None)
        own.table = torch.zeros(3)
        return own


class Clashing(OwnConfig):
    """Has a part with a name of this project's models."""

    def build(self) -> nn.Module:
        """Return a module with a fault."""
        own = Own(False, None)
        own.context = nn.Linear(2, 2)
        return own


@pytest.mark.parametrize(
    ("model", "phrase"),
    [
        (Clashing(), "rename it"),
        (OwnConfig(vocab_size=300), "shape"),
        (OwnConfig(cap=0.3), "leave out OwnConfig.head"),
        (NoModule(), "must return an nn.Module"),
        (Normalized(), "batch normalization"),
        (Loose(), "register_buffer"),
    ],
)
def test_a_module_that_would_train_wrongly_is_refused(
    model: OwnConfig, phrase: str
) -> None:
    """Oracle: the words of the sentence, before any rank starts."""
    with pytest.raises((ConfigError, ValueError), match=phrase):
        own_config(FSDP2Config(), 2, model)


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"cp_size": 2}, r"mesh\.cp_size=1"),
        ({"tp_size": 2}, r"mesh\.tp_size=1"),
        ({"memory": CHUNKED, "model": OwnConfig(has_head=False)}, "method head"),
    ],
)
def test_options_without_a_way_are_refused(
    options: dict[str, Any], phrase: str
) -> None:
    """Oracle: the words of the sentence."""
    with pytest.raises(ConfigError, match=phrase):
        own_config(FSDP2Config(), 2, **options)


def test_parameters_keep_the_names_of_the_module() -> None:
    """Oracle: the names of the module itself."""
    model = OwnConfig().build()
    assert list(dict(model.named_parameters())) == list(
        dict(Own(False, None).named_parameters())
    )
