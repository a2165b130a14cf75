"""Skipped optimizer steps: non-finite losses and gradients."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.errors import GivenUpError
from fsdptoys.memory import MemoryConfig, OffloadSchedule
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config
from tests.train.resumed import kept, steps_of

pytestmark = pytest.mark.usefixtures("without_pictures")


def poisoned(config: Config, steps: set[int], rank: int) -> tuple[Trainer, list[bool]]:
    """Train with non-finite gradients of one rank in some steps; return whether these kept the parameters."""
    trainer = Trainer(config)
    clip, same, before = trainer._clip, [], [""]

    def clip_poisoned(max_norm: float, unscale: float) -> torch.Tensor:
        step = trainer.steps_done + 1
        if step - 1 in steps:
            same.append(hash_parameters(trainer) == before[0])
        before[0] = hash_parameters(trainer)
        if step in steps and trainer.rank == rank:
            grads = [
                local_tensor(param.grad) for _, param in trainer.strategy.named_parameters() if param.grad is not None
            ]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = float("inf")
        return clip(max_norm, unscale)

    trainer._clip = clip_poisoned  # type: ignore[method-assign]
    try:
        Run(trainer).run()
    except GivenUpError as error:
        trainer.given_up = str(error)  # type: ignore[attr-defined]
    return trainer, same


def poison_all(rows: dict[str, Config], folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")  # PyTorch's schedules warn about a first step without an optimizer step
    outcomes = {}
    for label, config in rows.items():
        trainer, same = poisoned(kept(config, folder / label, every=0), {1, 4}, rank=1)
        outcomes[label] = [step.skipped for step in trainer.history], same, hash_parameters(trainer)
    return outcomes


def test_non_finite_step_of_one_rank_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    """Oracle: the parameters before the step, and the other ranks."""
    lazy = MemoryConfig(optimizer_offload=True, offload_schedule=OffloadSchedule.lazy)
    rows = {
        "ddp": make_config(DDPConfig(), 2, steps=5),
        "fsdp1": make_config(FSDP1Config(), 2, steps=5),
        "fsdp2": make_config(FSDP2Config(), 2, steps=5),
        "fsdp2, default": make_config(FSDP2Config(), 2, steps=5, deterministic=False, max_grad_norm=None),
        "fsdp2, lazy": make_config(FSDP2Config(), 2, steps=5, memory=lazy),
    }
    first, second = run_ranks(2, poison_all, rows, tmp_path)
    for label in rows:
        assert first[label][:2] == second[label][:2] == ([True, False, False, True, False], [True, True]), label
        assert first[label][2] == second[label][2]
        assert [step[-1] for step in steps_of(tmp_path / label)] == [1, 1, 1, 2, 2]


def give_up(config: Config) -> tuple[str, int, str]:
    trainer, _ = poisoned(config, {2, 3, 4, 5, 6}, rank=0)
    return trainer.given_up, trainer.steps_done, hash_parameters(trainer)  # type: ignore[attr-defined]


def load_and_hash(config: Config) -> tuple[int, str]:
    trainer = Trainer(config)
    run = Run(trainer)
    run.checkpoints = run._open_checkpoints()
    run._resume()
    return trainer.steps_done, hash_parameters(trainer)


def test_too_many_skipped_steps_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """Oracle: the parameters at the end, loaded from the last checkpoint; no older one was deleted for it."""
    config = make_config(FSDP2Config(), 2, steps=8, max_skipped_in_a_row=3)
    kept_config = kept(config, tmp_path, every=1, keep=1)
    (message, steps, hashed), _ = run_ranks(2, give_up, kept_config)
    assert steps == 4
    assert message.startswith("stopped after step 4: 3 steps in a row had a non-finite loss or gradients")
    assert "the newest checkpoint is that of step 4" in message
    assert [path.name[-1] for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["3", "4"]
    assert run_ranks(2, load_and_hash, kept_config)[0] == (4, hashed)


def poison(rows: list[tuple[Config, set[int]]]) -> list[tuple[list[bool], list[float], str | None]]:
    outcomes = []
    for config, steps in rows:
        trainer, _ = poisoned(config, steps, rank=0)
        skipped, losses = zip(*((step.skipped, step.loss) for step in trainer.history), strict=True)
        outcomes.append((list(skipped), list(losses), getattr(trainer, "given_up", None)))
    return outcomes


def test_limit_counts_all_skipped_steps_and_skipping_can_be_disabled(tmp_path: Path) -> None:
    """Oracle: two skipped steps with a good one between them; the losses after an unskipped step."""
    limited = kept(make_config(FSDP2Config(), 2, steps=6, max_skipped=2), tmp_path / "limited", every=0)
    unskipped = kept(make_config(FSDP2Config(), 2, steps=4, skip_nonfinite=False), tmp_path / "unskipped", every=0)
    first, second = run_ranks(2, poison, [(limited, {1, 3}), (unskipped, {2})])[0]
    skipped, _, message = first
    assert skipped == [True, False, True] and message is not None
    assert "2 steps in all had a non-finite loss or gradients (train.max_skipped=2)" in message
    skipped, losses, message = second
    assert skipped == [False] * 4 and message is None
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, False]
