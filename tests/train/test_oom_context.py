"""Out-of-memory errors of a run: the phase, the live bytes and the advice."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.memory import MemoryConfig, OffloadSchedule
from fsdptoys.parallel import DDPConfig, FSDP2Config, SingleConfig
from fsdptoys.parallel.ddp import DDP
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.profiler import ExplainedOutOfMemoryError, live_bytes
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config


def run_out_of_memory(config: Config, part: str) -> str:
    """The report of a run whose second step runs out of memory in the given part."""
    trainer = Trainer(config)
    owner, name = {
        "forward": (trainer.strategy.model, "forward"),
        "backward": (torch.Tensor, "backward"),
        "optimizer": (trainer.optimizer, "step"),
        "evaluation": (trainer.strategy.model, "eval"),
    }[part]
    original = getattr(owner, name)

    def greedy(*args: Any, **options: Any) -> Any:
        if len(trainer.history) == 1:
            torch.empty(2**50, dtype=torch.uint8)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExplainedOutOfMemoryError) as caught:
        patch.setattr(owner, name, greedy)
        trainer.train()
    return str(caught.value)


def run_out_of_memory_in(config: Config, parts: Sequence[str]) -> list[str]:
    return [run_out_of_memory(config, part) for part in parts]


def construct_out_of_memory(configs: Sequence[Config]) -> list[str]:
    def refuse(*_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    FSDP2.parallelize = DDP.parallelize = refuse  # type: ignore[method-assign]
    reports = []
    for config in configs:
        with pytest.raises(ExplainedOutOfMemoryError) as caught:
            Trainer(config)
        reports.append(str(caught.value))
    return reports


def test_out_of_memory_in_construction_reports_the_planned_bytes() -> None:
    """Oracle: four bytes a parameter, over the ranks that share them; sharding is advised where there is none."""
    configs = [make_config(parallel, 2) for parallel in (DDPConfig(), FSDP2Config())]
    total = sum(param.numel() for param in configs[0].model.build().parameters())
    for share, report in zip((1, 2), run_ranks(2, construct_out_of_memory, configs)[0], strict=True):
        assert "ran out on rank 0 in the construction\n" in report
        assert f"{4 * total / share / 2**10:.2f} KiB  parameters, when complete" in report
        assert ("parallel=fsdp2 mesh.fsdp_size=-1" in report) == (share == 1)


LAZY = MemoryConfig(optimizer_offload=True, offload_schedule=OffloadSchedule.lazy)


def memory_of_a_lazy_run(config: Config) -> tuple[int, int]:
    """Bytes of gradients in the report after a deferred step, and of the local parameters."""
    trainer = Trainer(config)
    trainer._train_step(1, 0.0)
    parameters = live_bytes((param for _, param in trainer.strategy.named_parameters()), None).parameters
    return trainer._oom_context(2).live.gradients.host_bytes, parameters.host_bytes


def test_gradients_of_deferred_steps_count_as_gradients() -> None:
    """Oracle: the bytes of the parameters."""
    gradients, parameters = run_ranks(1, memory_of_a_lazy_run, make_config(SingleConfig(), 1, memory=LAZY))[0]
    assert gradients == parameters > 0


def test_out_of_memory_reports_phase_live_bytes_and_advice() -> None:
    """Oracle: a failed allocation of 1 PiB in that part; activations are live in forward and backward only."""
    parts = ("forward", "backward", "optimizer", "evaluation")
    config = make_config(FSDP2Config(), 2, grad_accum=1, eval_every=2)
    for part, report in zip(parts, run_ranks(2, run_out_of_memory_in, config, parts)[1], strict=True):
        assert f"on rank 1 in the {part} of step 2\n1048576.00 GiB asked for" in report
        assert "optimizer states" in report
        assert ("memory.chunk_loss=true" in report) == (part in ("forward", "backward"))
