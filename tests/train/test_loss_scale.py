"""Float16 with a dynamic loss scale: its bits, its search, and a resume in the middle of it."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.config.schema import Config
from fsdptoys.errors import GivenUpError
from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import SGDConfig
from fsdptoys.optim.loss_scale import LossScaleConfig, LossScaler
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    ToyFSDPConfig,
    ToyZero1Config,
)
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.precision import DType
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    LAZY,
    MUON,
    OVERLAPPED,
    metrics_of,
    poison_gradients,
    run_to_the_end,
    run_until,
    with_checkpoints,
)
from tests.harness.tiny import TINY, make_config

pytestmark = pytest.mark.usefixtures("without_pictures")

HALF: dict[str, Any] = {"param_dtype": DType.float16}
FSDP2 = FSDP2Config(**HALF)
HYBRID = FSDP2 if TORCH >= (2, 8) else FSDP1Config(**HALF)
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="20")
EXPERTS = {"model": TINY["qwen3_moe"], "memory": CHUNKED, "max_grad_norm": None}

Outcome = tuple[list[float], list[str], list[float | None], list[bool], dict[str, str]]
"""Of each step loss, gradient norm, loss scale and whether it was skipped; hashes of the
parameters."""


def half(
    parallel: ParallelConfig,
    ranks: int,
    initial: float = 2.0**17,
    interval: int = 1,
    **options: Any,
) -> Config:
    """Two micro-batches, clipping, and a scale that grows until it overflows."""
    config = make_config(
        parallel, ranks, **{"steps": 3, "batch_size": 1, "seq_len": 12, **options}
    )
    return dataclasses.replace(
        config, loss_scale=LossScaleConfig(initial=initial, growth_interval=interval)
    )


def single(ranks: int = 1, **options: Any) -> Config:
    return half(SingleConfig(simulated_ranks=ranks, **HALF), 1, **options)


def train(config: Config) -> Outcome:
    trainer = Trainer(config)
    trainer.train()
    steps = trainer.history
    return (
        [step.loss for step in steps],
        [repr(step.grad_norm) for step in steps],
        [step.loss_scale for step in steps],
        [step.skipped for step in steps],
        hash_parameters(trainer),
    )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (DDPConfig(**HALF), {}),
        (FSDP1Config(**HALF), {}),
        (FSDP2, {}),
        (ToyZero1Config(**HALF), {}),
        (ToyFSDPConfig(**HALF), {}),
        (FSDP2, {"memory": LAZY}),
        pytest.param(FSDP2, {"memory": OVERLAPPED}, marks=pytest.mark.extended),
        (FSDP2, MUON),
        (FSDP2, EXPERTS),
        pytest.param(HYBRID, {"fsdp_size": 2}, marks=pytest.mark.extended),
    ],
    ids=[
        *("ddp", "fsdp1", "fsdp2", "toy_zero1", "toy_fsdp"),
        *("lazy", "overlapped", "muon", "experts", "hybrid"),
    ],
)
def test_every_strategy_scales_skips_and_trains_bitwise_as_a_single_process(
    parallel: ParallelConfig, options: dict[str, Any]
) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode; all ranks
    agree."""
    ranks = 2 * options.get("fsdp_size", 1)
    of_one = {
        key: value
        for key, value in options.items()
        if value not in (LAZY, OVERLAPPED, 2)
    }
    expected = run_ranks(1, train, single(ranks, **of_one))[0]
    assert (
        run_ranks(ranks, train, half(parallel, ranks, **options)) == [expected] * ranks
    )
    assert False in expected[3] and (options or True in expected[3])


def grad_scaler_scales(overflows: list[bool], *settings: float) -> list[float]:
    """Scales of ``torch.amp.GradScaler`` at steps; some overflow."""
    scaler = torch.amp.GradScaler("cpu", *settings)  # type: ignore[arg-type]
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflows_now in overflows:
        scales.append(scaler.get_scale())
        weight.grad = torch.tensor(math.inf if overflows_now else 1.0)
        scaler.scale(weight.detach())  # as a training loop, which creates the scale
        scaler.step(optimizer)
        scaler.update()
    return scales


@pytest.mark.parametrize("initial", [65536.0, 3.0, 2.0**100])
@pytest.mark.parametrize("factors", [(2.0, 0.5, 3), (1.7, 0.3, 2)], ids=str)
def test_scale_has_the_bits_of_grad_scaler(
    factors: tuple[float, float, int], initial: float
) -> None:
    """Oracle: ``torch.amp.GradScaler`` given the same overflows, also near the largest float32."""
    overflows = (
        torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.1
    ).tolist()
    scaler = LossScaler(LossScaleConfig(initial, *factors))
    scales = []
    for overflows_now in overflows:
        scales.append(scaler.scale)
        scaler.update(overflows_now)
    assert scales == grad_scaler_scales(overflows, initial, *factors)


def overflow(
    config: Config, steps: set[int]
) -> tuple[list[tuple[float | None, bool]], dict[str, str]]:
    """Train with an infinite gradient on the last rank in some steps; scales, skipped steps and
    parameters."""
    trainer = Trainer(config)
    poison_gradients(trainer, steps, trainer.world.world_size - 1)
    with suppress(GivenUpError):
        Run(trainer).run()
    return [
        (step.loss_scale, step.skipped) for step in trainer.history
    ], hash_parameters(trainer)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", [FSDP2Config, ToyZero1Config])
def test_infinities_of_one_rank_follow_grad_scaler_on_all_ranks(
    kind: Callable[..., ParallelConfig], tmp_path: Path
) -> None:
    """Oracle: ``torch.amp.GradScaler`` on one process with the same overflows, which count for no
    limit."""
    infinite = [True, True, False, False, True, False, True]
    options: dict[str, Any] = {"initial": 256.0, "interval": 2, "steps": len(infinite)}
    options |= {"seq_len": 8}
    config = half(kind(**HALF), 2, **options, max_skipped=2, max_skipped_in_a_row=2)
    first, second = run_ranks(
        2, overflow, with_checkpoints(config, tmp_path, every=0), {1, 2, 5, 7}
    )
    expected = list(
        zip(grad_scaler_scales(infinite, 256.0, 2.0, 0.5, 2), infinite, strict=True)
    )
    assert first == second and first[0] == expected
    lines = metrics_of(tmp_path)
    assert [(line["loss_scale"], line["skipped"]) for line in lines] == expected
    assert [line["skipped_steps"] for line in lines] == [1, 2, 2, 2, 3, 3, 4]
    summary = (tmp_path / "summary.md").read_text()
    assert (
        "| loss scale | 64 in the last step, 64 at the lowest |" in summary
        and "| skipped steps | 4 |" in summary
    )


def test_overflows_that_no_lower_scale_avoids_end_the_run(tmp_path: Path) -> None:
    """Oracle: the limit of two; the step of scale 2 belongs to the search for a scale and does not
    count."""
    config = single(initial=2.0, steps=6, seq_len=8, max_skipped_in_a_row=2)
    scales, _ = run_ranks(
        1, overflow, with_checkpoints(config, tmp_path, every=0), {1, 2, 3, 4, 5}
    )[0]
    assert scales == [(2.0, True), (1.0, True), (0.5, True)]


def kill(config: Config, folder: Path, has_scale: bool = True) -> None:
    """End before step 4, with a checkpoint of step 3."""

    def prepare(trainer: Trainer) -> None:
        if not has_scale:
            whole = trainer.state_dict
            trainer.state_dict = lambda: {
                k: v for k, v in whole().items() if k != "loss_scale"
            }  # type: ignore[method-assign]

    run_until(with_checkpoints(config, folder), 4, prepare)


def resume(config: Config, killed: Path) -> tuple[list[float | None], dict[str, str]]:
    """Resume a copy of a killed run; scales and parameters."""
    folder = killed.with_name("resumed")
    if dist.get_rank() == 0:
        shutil.copytree(killed, folder)
    dist.barrier()
    trainer = run_to_the_end(with_checkpoints(config, folder))
    return [step.loss_scale for step in trainer.history], hash_parameters(trainer)


@pytest.mark.usefixtures("unmeasured")
def test_scale_and_bits_survive_a_resume_under_another_strategy_and_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Oracle: one process without interruption; the counter of steps since the last overflow is
    resumed too."""
    options: dict[str, Any] = {"steps": 6, "interval": 2, "initial": 1024.0}
    run_ranks(2, kill, half(FSDP2, 2, **options), tmp_path / "killed")
    _, _, scales, _, parameters = run_ranks(1, train, single(2, **options))[0]
    assert run_ranks(1, resume, single(2, **options), tmp_path / "killed")[0] == (
        scales[3:],
        parameters,
    )
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0]


def test_checkpoint_without_a_scale_resumes_in_float16_from_the_initial_one(
    tmp_path: Path,
) -> None:
    """Oracle: the configured scale; the checkpoint is of bfloat16, in the form of versions without
    float16."""
    options: dict[str, Any] = {"steps": 5, "seq_len": 8}
    coarse = make_config(SingleConfig(param_dtype=DType.bfloat16), 1, **options)
    run_ranks(1, kill, coarse, tmp_path / "killed", False)
    assert run_ranks(1, resume, single(initial=64.0, **options), tmp_path / "killed")[
        0
    ][0] == [
        64.0,
        128.0,
    ]


def test_skips_in_the_search_for_a_scale_count_for_no_limit_after_a_resume_in_another_dtype(
    tmp_path: Path,
) -> None:
    """Oracle: the limit of two skips; two overflows in float16 and one infinite gradient in
    bfloat16."""
    options: dict[str, Any] = {"seq_len": 8, "max_skipped": 2}
    scaled = single(initial=256.0, steps=3, **options)
    coarse = make_config(
        SingleConfig(param_dtype=DType.bfloat16), 1, steps=5, batch_size=1, **options
    )
    run_ranks(1, overflow, with_checkpoints(scaled, tmp_path), {1, 2})
    assert run_ranks(1, overflow, with_checkpoints(coarse, tmp_path), {4})[0][0] == [
        (None, True),
        (None, False),
    ]


@pytest.mark.parametrize(
    "memory",
    [None, pytest.param(CHUNKED, marks=pytest.mark.extended)],
    ids=["plain", "chunked"],
)
def test_float16_losses_are_closer_to_float32_than_bfloat16s(
    memory: MemoryConfig | None,
) -> None:
    """Oracle: float32; a rounding to 11 bits has an eighth of the error of 8, and 2**-11 of the
    loss is 0.002.

    A scale of 2**-20 in the last run loses small gradients, so that the loss scale is seen to
    matter.
    """
    options: dict[str, Any] = {
        "steps": 8,
        "batch_size": 1,
        "seq_len": 16,
        "memory": memory,
    }
    options["deterministic"] = False
    # Adam turns rounding of small gradients into full updates
    options["optim"] = SGDConfig(lr=1.0)
    configs = [
        make_config(SingleConfig(param_dtype=dtype), 1, **options)
        for dtype in (DType.float32, DType.bfloat16)
    ]
    configs += [
        single(initial=initial, interval=1000, **options)
        for initial in (1024.0, 2.0**-20)
    ]
    outcomes = run_ranks(1, lambda: [train(config) for config in configs])[0]
    exact, coarse, fine, unscaled = (torch.tensor(losses) for losses, *_ in outcomes)
    errors = [
        (losses - exact).abs().max().item() for losses in (fine, coarse, unscaled)
    ]
    assert errors[0] < 0.002 < errors[2]
    assert errors[0] < 0.5 * errors[1]


def test_factor_on_the_loss_does_not_depend_on_the_layout() -> None:
    """Oracle: the same number of micro-batches; powers of two, which are exact."""
    scaler = LossScaler(LossScaleConfig())
    assert [scaler.loss_factor(count) / 65536 for count in (1, 2, 3, 5, 6, 8)] == [
        1,
        2,
        4,
        4,
        8,
        8,
    ]
