"""Pipeline parallelism: ranks with some of the layers train like one process, with every schedule.

``test_layout_mode.py`` compares the bits, and resumes runs with other stages.
"""

import dataclasses
import re
from itertools import product
from typing import Any

import pytest
import torch

from fsdptoys.config.rules.pipeline import ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import make_config, refusal
from tests.parallel.numeric_outcomes import SGD, assert_close, train_all
from tests.parallel.split_models import STAGES, needs_sums

TRIED = [
    schedule
    for schedule in PipelineSchedule
    if TORCH >= ZERO_BUBBLE_SINCE or schedule is not PipelineSchedule.zero_bubble
]


def pipeline(name: str, **options: Any) -> FSDP2Config:
    return FSDP2Config(schedule=PipelineSchedule(name), **options)


COMMON: dict[str, Any] = {
    "model": STAGES["qwen3_moe"],
    "batch_size": 1,
    "grad_accum": 4,
    "steps": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "optim": SGD,
    "deterministic": False,
}
ROWS = {
    f"{schedule.value} {dtype.value} on {ranks}": Row(
        FSDP2Config(schedule=schedule, param_dtype=dtype), ranks, {"pp_size": 2}, COMMON
    )
    for ranks, schedule, dtype in product((2, 4), TRIED, DType)
    if dtype is DType.float32 or schedule is TRIED[-1]
}
SHORT = {row for row in ROWS if row.endswith("on 2") and " float16" not in row}
trained = trained_rows(ROWS, train_all)


@needs_sums
@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_every_schedule_trains_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process: losses, held-out losses, norms, balance of experts, parameters; padding,
    clipping.

    In 16 bits, parameters of a schedule that adds up gradients in them would be further away.
    """
    actual, expected = (
        dataclasses.replace(result, grads={}) for result in trained[row]
    )
    assert_close(actual, expected)


def spoil_last_stage(config: Config) -> list[bool]:
    trainer = Trainer(config)
    clip = trainer.stepper.clip

    def spoil_and_clip(*args: Any) -> torch.Tensor:
        if trainer.world.rank == trainer.world.world_size - 1:
            next(
                param.grad
                for _, param in trainer.strategy.named_parameters()
                if param.grad is not None
            ).fill_(float("nan"))
        return clip(*args)

    trainer.stepper.clip = spoil_and_clip  # type: ignore[method-assign]
    before = hash_parameters(trainer)
    trainer.train()
    return [step.skipped for step in trainer.history] + [
        hash_parameters(trainer) == before
    ]


@needs_sums
def test_a_gradient_that_is_not_finite_skips_the_update_of_all_stages() -> None:
    """Oracle: the initial parameters."""
    config = make_config(
        pipeline("1f1b"),
        2,
        model=STAGES["llama"],
        pp_size=2,
        steps=1,
        deterministic=False,
    )
    assert run_ranks(2, spoil_last_stage, config) == [[True, True]] * 2


def test_older_versions_of_torch_have_fewer_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the sentences; gpipe passes."""
    options: dict[str, Any] = {"pp_size": 2, "deterministic": False}
    monkeypatch.setattr("fsdptoys.config.rules.pipeline.TORCH", (2, 11))
    message = refusal(pipeline("zero_bubble"), 4, **options)
    assert re.match(
        r"parallel\.schedule=zero_bubble needs torch 2\.13 .*; set .*=interleaved",
        message,
    )
    monkeypatch.setattr("fsdptoys.config.rules.pipeline.TORCH", (2, 10))
    message = refusal(pipeline("1f1b"), 4, **options)
    assert re.match(
        r"parallel\.schedule=1f1b needs torch 2\.11 .*; set parallel\.sch", message
    )
    make_config(pipeline("gpipe"), 4, **options)
