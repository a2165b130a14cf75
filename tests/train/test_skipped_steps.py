"""Skipped optimizer steps: a loss or a gradient that is not finite on one rank."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.errors import GivenUpError
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
)
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    LAZY,
    poison_gradients,
    steps_of,
    with_checkpoints,
)
from tests.harness.tiny import make_config

pytestmark = pytest.mark.usefixtures("without_pictures")


def skip(config: Config, steps: set[int]) -> tuple[list[bool], list[bool], str]:
    """Make gradients of the last rank infinite in some steps.

    Returns:
        Which steps were skipped, whether these left the parameters unchanged, and a hash of the
        parameters at the end.
    """
    # PyTorch's schedules warn about a first step without an optimizer step.
    warnings.simplefilter("error")
    trainer = Trainer(config)
    unchanged = []
    hashes = [""]

    def note(step: int) -> None:
        hashes.append(str(hash_parameters(trainer)))
        if step - 1 in steps:
            unchanged.append(hashes[-1] == hashes[-2])

    poison_gradients(trainer, steps, trainer.world.world_size - 1, note)
    Run(trainer).run()
    return (
        [step.skipped for step in trainer.history],
        unchanged,
        str(hash_parameters(trainer)),
    )


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (DDPConfig(), {}),
        (FSDP1Config(), {}),
        (FSDP2Config(), {}),
        (FSDP2Config(), {"deterministic": False, "max_grad_norm": None}),
        (FSDP2Config(), {"memory": LAZY}),
    ],
    ids=["ddp", "fsdp1", "fsdp2", "fsdp2 without clipping", "fsdp2, lazy"],
)
def test_non_finite_step_of_one_rank_is_skipped_on_all_ranks(
    parallel: ParallelConfig, options: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the parameters before the step, and the other ranks."""
    config = with_checkpoints(
        make_config(parallel, 2, steps=5, **options), tmp_path, every=0
    )
    first, second = run_ranks(2, skip, config, {1, 4})
    assert first[:2] == ([True, False, False, True, False], [True, True])
    assert first == second
    assert [step[-1] for step in steps_of(tmp_path)] == [1, 1, 1, 2, 2]


def give_up(
    config: Config, steps: set[int]
) -> tuple[str, list[bool], list[float], str]:
    """Message, skipped steps, losses and parameters of a run with infinite gradients of its first
    rank in some steps."""
    trainer = Trainer(config)
    poison_gradients(trainer, steps, rank=0)
    message = ""
    try:
        Run(trainer).run()
    except GivenUpError as error:
        message = str(error)
    history = trainer.history
    return (
        message,
        [step.skipped for step in history],
        [step.loss for step in history],
        str(hash_parameters(trainer)),
    )


def load_and_hash(config: Config) -> tuple[int, str]:
    trainer = Trainer(config)
    run = Run(trainer)
    run.checkpoints = run._open_checkpoints()
    run._resume()
    return trainer.steps_done, str(hash_parameters(trainer))


def test_too_many_skipped_steps_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """Oracle: the parameters at the end, loaded from the last checkpoint; no older one was deleted
    for it."""
    config = with_checkpoints(
        make_config(FSDP2Config(), 2, steps=8, max_skipped_in_a_row=3),
        tmp_path,
        every=1,
        keep=1,
    )
    message, skipped, _, parameters = run_ranks(2, give_up, config, {2, 3, 4, 5, 6})[0]
    assert skipped == [False, True, True, True]
    assert message.startswith(
        "stopped after step 4: 3 steps in a row had a non-finite loss or gradients"
    )
    assert "the newest checkpoint is that of step 4" in message
    assert [
        path.name[-1] for path in sorted((tmp_path / "checkpoints").glob("step-*"))
    ] == [
        "3",
        "4",
    ]
    assert run_ranks(2, load_and_hash, config)[0] == (4, parameters)


def test_limit_counts_all_skipped_steps(tmp_path: Path) -> None:
    """Oracle: two skipped steps with a good one between them."""
    config = with_checkpoints(
        make_config(FSDP2Config(), 2, steps=6, max_skipped=2), tmp_path, every=0
    )
    message, skipped, *_ = run_ranks(2, give_up, config, {1, 3})[0]
    assert skipped == [True, False, True]
    assert (
        "2 steps in all had a non-finite loss or gradients (train.max_skipped=2)"
        in message
    )


def test_skipping_can_be_disabled(tmp_path: Path) -> None:
    """Oracle: the losses after an unskipped step."""
    config = with_checkpoints(
        make_config(FSDP2Config(), 2, steps=4, skip_nonfinite=False), tmp_path, every=0
    )
    message, skipped, losses, _ = run_ranks(2, give_up, config, {2})[0]
    assert skipped == [False] * 4 and message == ""
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, False]
