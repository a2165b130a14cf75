"""float16 with dynamic loss scaling: the scale, skipped steps and bits of all strategies."""

import dataclasses
import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.config.schema import Config
from fsdptoys.errors import GivenUpError
from fsdptoys.memory import CPUOffloadExecutor, MemoryConfig, OffloadSchedule
from fsdptoys.optim import MuonConfig, SGDConfig
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
from fsdptoys.utils.dtensor import local_tensor
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config
from tests.train.resumed import kept, run_to_the_end, run_until

HALF: dict[str, Any] = {"param_dtype": DType.float16}
STRATEGIES: dict[str, ParallelConfig] = {
    "ddp": DDPConfig(**HALF),
    "fsdp1": FSDP1Config(**HALF),
    "fsdp2": FSDP2Config(**HALF),
    "toy_zero1": ToyZero1Config(**HALF),
    "toy_fsdp": ToyFSDPConfig(**HALF),
}
MEMORY = {
    "lazy offload": MemoryConfig(optimizer_offload=True, offload_schedule=OffloadSchedule.lazy),
    "overlapped": MemoryConfig(cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped),
}
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="20")

Outcome = tuple[list[float], list[str], list[float | None], list[bool], dict[str, str]]
"""Of each step loss, gradient norm, loss scale and whether it was skipped; hashes of the parameters."""


def half(parallel: ParallelConfig, ranks: int, initial: float = 2.0**17, interval: int = 1, **options: Any) -> Config:
    """Two micro-batches, clipping, and a scale that grows until it overflows."""
    config = make_config(parallel, ranks, **{"steps": 3, "batch_size": 1, "seq_len": 12, **options})
    return dataclasses.replace(config, loss_scale=LossScaleConfig(initial=initial, growth_interval=interval))


def train_all(configs: list[Config]) -> list[Outcome]:
    outcomes = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        steps = trainer.history
        columns = [[m.loss for m in steps], [repr(m.grad_norm) for m in steps], [m.loss_scale for m in steps]]
        outcomes.append((*columns, [m.skipped for m in steps], hash_parameters(trainer)))
    return outcomes  # type: ignore[return-value]


def single(ranks: int, **options: Any) -> Config:
    return half(SingleConfig(simulated_ranks=ranks, **HALF), 1, **options)


@pytest.mark.usefixtures("unmeasured")
def test_all_strategies_scale_skip_and_train_bitwise_as_a_single_process() -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode; both ranks agree."""
    others: dict[str, dict[str, Any]] = {
        "muon": {"optim": MuonConfig(lr=1e-2)},
        "experts, chunked, no clipping": {"model": TINY["qwen3_moe"], "memory": CHUNKED, "max_grad_norm": None},
    }
    alike = {name: half(parallel, 2) for name, parallel in STRATEGIES.items()}
    alike |= {name: half(FSDP2Config(**HALF), 2, memory=memory) for name, memory in MEMORY.items()}
    configs = [*alike.values(), *(half(FSDP2Config(**HALF), 2, **options) for options in others.values())]
    first, *rest = run_ranks(1, train_all, [single(2), *(single(2, **options) for options in others.values())])[0]
    expected = dict(zip([*alike, *others], [*[first] * len(alike), *rest], strict=True))
    for outcomes in run_ranks(2, train_all, configs):
        found = dict(zip(expected, outcomes, strict=True))
        assert [name for name, outcome in found.items() if outcome != expected[name]] == []
    assert set(first[3]) == {True, False}
    assert all(False in skipped for *_, skipped, _ in rest)


@pytest.mark.usefixtures("unmeasured")
def test_hybrid_sharding_scales_skips_and_trains_bitwise_as_a_single_process() -> None:
    """Oracle: one process that runs the same micro-batches in turn."""
    kind = FSDP2Config if TORCH >= (2, 8) else FSDP1Config
    reference = run_ranks(1, train_all, [single(4)])[0][0]
    assert run_ranks(4, train_all, [half(kind(**HALF), 4, fsdp_size=2)]) == [[reference]] * 4
    assert True in reference[3] and False in reference[3]


@pytest.mark.parametrize("factors", [(2.0, 0.5, 3), (1.7, 0.3, 2)], ids=str)
def test_scale_has_the_bits_of_grad_scaler(factors: tuple[float, float, int]) -> None:
    """Oracle: ``torch.amp.GradScaler`` given the same overflows, also near the largest float32."""
    for initial in (65536.0, 3.0, 2.0**100):
        ours = LossScaler(LossScaleConfig(initial, *factors))
        theirs = torch.amp.GradScaler("cpu", initial, *factors)
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        drawn = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.1
        for overflowed in drawn.tolist():
            assert ours.scale == theirs.get_scale()
            weight.grad = torch.tensor(math.inf if overflowed else 1.0)
            theirs.scale(weight.detach())  # as a training loop, which creates the scale
            theirs.step(optimizer)
            theirs.update()
            ours.update(overflowed)


def poison(configs: dict[str, Config], steps: set[int], folder: Path, every: int = 0) -> dict[str, Any]:
    """Train with an infinite gradient on one rank in some steps, and resume if there are checkpoints."""
    outcomes: dict[str, Any] = {}
    for label, config in configs.items():
        trainer = Trainer(kept(config, folder / label, every=every))
        clip = trainer._clip

        def poisoned(max_norm: float, unscale: float, trainer: Trainer = trainer, clip: Any = clip) -> torch.Tensor:
            if trainer.steps_done + 1 in steps and trainer.rank == trainer.world_size - 1:
                grads = [param.grad for _, param in trainer.strategy.named_parameters() if param.grad is not None]
                next(grad for grad in map(local_tensor, grads) if grad.numel()).view(-1)[0] = math.inf
            return clip(max_norm, unscale)

        trainer._clip = poisoned  # type: ignore[method-assign]
        with suppress(GivenUpError):
            Run(trainer).run()
        outcomes[label] = [(m.loss_scale, m.skipped) for m in trainer.history], hash_parameters(trainer)
    return outcomes


@pytest.mark.usefixtures("unmeasured", "without_pictures")
def test_infinities_of_one_rank_follow_grad_scaler_on_all_ranks(tmp_path: Path) -> None:
    """Oracle: ``torch.amp.GradScaler`` on one process with the same overflows, which count for no limit."""
    steps, infinite = 7, {1, 2, 5, 7}
    options: dict[str, Any] = {"initial": 256.0, "interval": 2, "steps": steps, "seq_len": 8}
    options |= {"max_skipped": 2, "max_skipped_in_a_row": 2}
    rows = {name: half(STRATEGIES[name], 2, **options) for name in ("fsdp2", "toy_zero1")}
    scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer, expected = torch.optim.SGD([weight], lr=0.0), []
    for step in range(1, steps + 1):
        expected.append((scaler.get_scale(), step in infinite))
        scaler.scale(weight.detach())
        weight.grad = torch.tensor(math.inf if step in infinite else 1.0)
        scaler.step(optimizer)
        scaler.update()
    first, second = run_ranks(2, poison, rows, infinite, tmp_path)
    assert first == second
    assert {label: scales for label, (scales, _) in first.items()} == dict.fromkeys(rows, expected)
    lines = [json.loads(line) for line in (tmp_path / "fsdp2" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss_scale"], line["skipped"]) for line in lines] == expected
    assert [line["skipped_steps"] for line in lines] == [1, 2, 2, 2, 3, 3, 4]
    summary = (tmp_path / "fsdp2" / "summary.md").read_text()
    assert "| loss scale | 64 in the last step, 64 at the lowest |" in summary and "| skipped steps | 4 |" in summary


@pytest.mark.usefixtures("without_pictures")
def test_overflows_that_no_lower_scale_avoids_end_the_run(tmp_path: Path) -> None:
    """Oracle: the limit of two; the step of scale 2 belongs to the search for a scale and does not count."""
    config = half(SingleConfig(**HALF), 1, initial=2.0, steps=6, seq_len=8, max_skipped_in_a_row=2)
    scales, _ = run_ranks(1, poison, {"run": config}, {1, 2, 3, 4, 5}, tmp_path)[0]["run"]
    assert scales == [(2.0, True), (1.0, True), (0.5, True)]


def resume(configs: dict[str, Config], killed: Path) -> dict[str, Any]:
    """Resume copies of a killed run."""
    outcomes = {}
    for label, config in configs.items():
        folder = killed.parent / label
        if dist.get_rank() == 0:
            shutil.copytree(killed, folder)
        dist.barrier()
        trainer = run_to_the_end(kept(config, folder))
        outcomes[label] = [m.loss_scale for m in trainer.history], hash_parameters(trainer)
    return outcomes


def kill(config: Config, folder: Path, without_scale: bool) -> None:
    """End before step 4, with a checkpoint of step 3."""

    def prepare(trainer: Trainer) -> None:
        if without_scale:
            whole = trainer.state_dict
            trainer.state_dict = lambda: {k: v for k, v in whole().items() if k != "loss_scale"}  # type: ignore[method-assign]

    run_until(kept(config, folder), 4, prepare)


@pytest.mark.usefixtures("unmeasured", "without_pictures")
def test_scale_and_bits_survive_a_resume_under_another_strategy_and_number_of_ranks(tmp_path: Path) -> None:
    """Oracle: one process without interruption; the counter of steps since the last overflow is resumed too."""
    options: dict[str, Any] = {"steps": 6, "interval": 2, "initial": 1024.0}
    run_ranks(2, kill, half(FSDP2Config(**HALF), 2, **options), tmp_path / "killed", False)
    whole = kept(single(2, **options), tmp_path / "whole", every=0)
    ((_, _, scales, _, parameters),) = run_ranks(1, train_all, [whole])[0]
    resumed = run_ranks(1, resume, {"single": single(2, **options)}, tmp_path / "killed")[0]
    assert resumed == {"single": (scales[3:], parameters)}
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0]


@pytest.mark.usefixtures("without_pictures")
def test_checkpoint_without_a_scale_resumes_in_float16_from_the_initial_one(tmp_path: Path) -> None:
    """Oracle: the configured scale; the checkpoint is of bfloat16, in the form of versions without float16."""
    options: dict[str, Any] = {"steps": 5, "seq_len": 8}
    run_ranks(1, kill, make_config(SingleConfig(param_dtype=DType.bfloat16), 1, **options), tmp_path / "killed", True)
    config = half(SingleConfig(**HALF), 1, initial=64.0, **options)
    assert run_ranks(1, resume, {"float16": config}, tmp_path / "killed")[0]["float16"][0] == [64.0, 128.0]


@pytest.mark.usefixtures("without_pictures")
def test_skips_in_the_search_for_a_scale_count_for_no_limit_after_a_resume_in_another_dtype(tmp_path: Path) -> None:
    """Oracle: the limit of two skips; two overflows in float16 and one infinite gradient in bfloat16."""
    options: dict[str, Any] = {"seq_len": 8, "max_skipped": 2}
    scaled = half(SingleConfig(**HALF), 1, initial=256.0, steps=3, **options)
    coarse = make_config(SingleConfig(param_dtype=DType.bfloat16), 1, steps=5, batch_size=1, **options)
    run_ranks(1, poison, {"run": scaled}, {1, 2}, tmp_path, 3)
    scales, _ = run_ranks(1, poison, {"run": coarse}, {4}, tmp_path, 3)[0]["run"]
    assert scales == [(None, True), (None, False)]


@pytest.mark.parametrize("memory", [None, CHUNKED], ids=["plain", "chunked"])
def test_float16_losses_are_closer_to_float32_than_bfloat16s(memory: MemoryConfig | None) -> None:
    """Oracle: float32; a rounding to 11 bits has an eighth of the error of 8, and 2**-11 of the loss is 0.002.

    A scale of 2**-20 in the last run loses small gradients, so that the loss scale is seen to matter.
    """
    options: dict[str, Any] = {"steps": 8, "batch_size": 1, "seq_len": 16, "deterministic": False, "memory": memory}
    options["optim"] = SGDConfig(lr=1.0)  # Adam turns rounding of small gradients into full updates
    usual = [make_config(SingleConfig(param_dtype=dtype), 1, **options) for dtype in (DType.float32, DType.bfloat16)]
    scaled = [half(SingleConfig(**HALF), 1, initial, interval=1000, **options) for initial in (1024.0, 2.0**-20)]
    outcomes = run_ranks(1, train_all, [*usual, *scaled])[0]
    exact, coarse, fine, unscaled = (torch.tensor(losses) for losses, *_ in outcomes)
    errors = [(losses - exact).abs().max().item() for losses in (fine, coarse, unscaled)]
    assert errors[0] < 0.002 < errors[2]
    assert errors[0] < 0.5 * errors[1]


def test_factor_on_the_loss_does_not_depend_on_the_layout() -> None:
    """Oracle: the same number of micro-batches; powers of two, which are exact."""
    scaler = LossScaler(LossScaleConfig())
    assert [scaler.loss_factor(count) / 65536 for count in (1, 2, 3, 5, 6, 8)] == [1, 2, 4, 4, 8, 8]
