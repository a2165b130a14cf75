"""Steps of an accelerator, whose numbers are read after the host has launched more work."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdptoys.config.schema import Config, SumDType
from fsdptoys.memory import Updates
from fsdptoys.memory.updates import GradientNorms
from fsdptoys.optim import SGDConfig
from fsdptoys.parallel import FSDP2Config
from fsdptoys.train import trainer as trainer_module
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from scripts.parity import hash_parameters
from tests.parallel.runs import make_config
from tests.simulated_npu.host_waits import ROWS, UNLOGGED, count_all, of_project
from tests.simulated_npu.ranks import run_npu_ranks
from tests.train.resumed import kept, run_to_the_end, run_until, steps_of


def test_a_step_waits_for_the_device_at_most_once() -> None:
    """Oracle: calls noted by the device; none without skipping. Experts one by one read their counts themselves."""
    for name, steps in count_all().items():
        calls = [sum(n for call, n in of_project(step).items() if "grouped.py" not in call) for step in steps]
        expected = 0 if ROWS[name][2].get("skip_nonfinite") is False else 1
        assert calls == [expected] * len(steps), (name, steps)


class SkipsOnDevice(Updates):
    """An optimizer without states that skips on the device, as fused kernels do."""

    skips_on_device = True

    def clip(self, norms: GradientNorms, max_norm: float, unscale: float = 1.0) -> Tensor:
        """Clip before the step."""
        return norms.clip_grad_norm(max_norm, unscale=unscale)

    def _step(self, skip: Tensor | None) -> None:
        params = [local_tensor(param) for group in self.optimizer.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in params]
        self.optimizer.step()
        if skip is not None:
            for param, old in zip(params, before, strict=True):
                param.detach().copy_(torch.where(skip > 0, old, param.detach()))


@contextmanager
def skipping_on_device() -> Iterator[None]:
    """Trainers made in this context skip on the device."""
    with mock.patch.object(trainer_module, "build_updates", lambda optimizer, *_: SkipsOnDevice(optimizer)):
        yield


def config_of(log_every: int = 10, **options: Any) -> Config:
    settings = {"optim": SGDConfig(lr=0.1, momentum=0.0), "deterministic": False, "sum_dtype": SumDType.float32}
    config = make_config(FSDP2Config(), 2, device="npu", seq_len=8, **{**settings, **options})  # type: ignore[arg-type]
    return replace(config, metrics=replace(config.metrics, log_every=log_every))


def poison(trainer: Trainer, steps: set[int], seen: dict[int, str] | None = None) -> None:
    """Make a gradient of the last rank infinite in some steps; note the parameters before each step in ``seen``."""
    clip = trainer._clip

    def poisoned(max_norm: float, unscale: float) -> Tensor:
        step = trainer.steps_done + 1
        if seen is not None:
            seen[step] = hash_parameters(trainer)
        if step in steps and trainer.rank == trainer.world_size - 1:
            grads = [param.grad for _, param in trainer.strategy.named_parameters() if param.grad is not None]
            next(grad for grad in map(local_tensor, grads) if grad.numel()).view(-1)[0].fill_(float("inf"))
        return clip(max_norm, unscale)

    trainer._clip = poisoned  # type: ignore[method-assign]


def read_after(trainer: Trainer, **arguments: Any) -> tuple[list[tuple[int, int]], str]:
    """Train; return each recorded step with the number of steps launched by then, and the reason for the end."""
    records: list[tuple[int, int]] = []
    stop = trainer.train(lambda metrics: records.append((metrics.step, trainer.steps_done)), **arguments)
    return records, stop.reason


def limits(config: Config) -> dict[str, Any]:
    with skipping_on_device():
        trainer = Trainer(config)
    seen: dict[int, str] = {}
    poison(trainer, {2, 3, 4, 5, 6}, seen)
    records, reason = read_after(trainer)
    flags = [(step.skipped, step.skipped_steps) for step in trainer.history]
    return {"records": records, "reason": reason, "flags": flags, "same": hash_parameters(trainer) == seen[2]}


def signalled(config: Config, step: int, on_device: bool) -> tuple[list[tuple[int, int]], str]:
    """Train, with a signal to rank 1 before a step."""
    if on_device:
        with skipping_on_device():
            trainer = Trainer(config)
    else:
        trainer = Trainer(config)
    request = SimpleNamespace(received=None)

    def on_phase(now: int, phase: str) -> None:
        if now == step and trainer.rank == 1:
            request.received = "SIGTERM"

    trainer.on_phase = on_phase
    return read_after(trainer, request=request)


def run_cases() -> dict[str, Any]:
    return {
        "limit": limits(config_of(steps=8, max_skipped_in_a_row=3)),
        "on device": signalled(config_of(steps=8), 3, True),
        "on host": signalled(config_of(steps=8), 3, False),
        "unskipped": signalled(config_of(4, steps=12, **UNLOGGED), 2, False),
        "unsignalled": read_after(Trainer(config_of(3, steps=8, **UNLOGGED))),
        "evaluated": read_after(Trainer(config_of(5, steps=4, eval_every=3, eval_batches=1, **UNLOGGED))),
    }


def test_steps_are_read_once_in_order_and_stops_come_at_most_one_read_later() -> None:
    """Oracle: the documented step of each read, on both ranks, with streams that work only when they are waited for."""
    first, second = run_npu_ranks(2, run_cases, mode="delayed")
    assert first == second
    limit = first["limit"]
    # Step 4 reaches the limit, and step 5 is launched when it is read. A record follows the launch of ``steps_done``.
    assert limit["records"] == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]
    assert limit["reason"] == "3 steps in a row had a non-finite loss or gradients (train.max_skipped_in_a_row=3)"
    assert limit["flags"] == [(False, 0), (True, 1), (True, 2), (True, 3), (True, 4)]
    assert limit["same"], "a skipped step changed the parameters"
    assert first["on device"] == ([(1, 2), (2, 3), (3, 4), (4, 4)], "SIGTERM received")
    assert first["on host"] == ([(1, 2), (2, 3), (3, 3)], "SIGTERM received")
    assert first["unskipped"] == ([(1, 2), (2, 5), (3, 5), (4, 5), (5, 5)], "SIGTERM received")
    rows = [(1, 2), (2, 4), (3, 4), (4, 7), (5, 7), (6, 7), (7, 8), (8, 8)]
    assert first["unsignalled"] == (rows, "all steps done")
    assert first["evaluated"] == ([(1, 2), (2, 3), (3, 3), (4, 4)], "all steps done")


def resume(folder: Path) -> tuple[str, str]:
    """Parameters of an uninterrupted run, and of one killed in step 6 and resumed from the checkpoint of step 4."""
    hashes = []
    with skipping_on_device():
        for name in ("whole", "killed"):
            config = kept(config_of(steps=8), folder / name, every=4)
            if name == "killed":
                run_until(config, 6, lambda trainer: poison(trainer, {4, 7}))
            hashes.append(hash_parameters(run_to_the_end(config, lambda trainer: poison(trainer, {4, 7}))))
    return hashes[0], hashes[1]


def test_checkpoint_has_the_counts_of_its_step_and_resumes_bitwise(tmp_path: Path) -> None:
    """Oracle: the uninterrupted run, with a skipped step just before the checkpoint."""
    whole, killed = run_npu_ranks(2, resume, tmp_path)[0]
    assert whole == killed
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "killed")
    assert [step[-1] for step in steps_of(tmp_path / "whole")] == [0, 0, 0, 1, 1, 1, 2, 2]


def fail(folder: Path) -> None:
    config = kept(config_of(4, steps=8, **UNLOGGED), folder, every=0)
    trainer = Trainer(config)
    next_step = trainer.batches.next_step

    def failing() -> Any:
        if trainer.steps_done == 3:
            raise KeyboardInterrupt
        return next_step()

    trainer.batches.next_step = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        Run(trainer).run()


def test_run_that_fails_records_the_steps_that_were_launched(tmp_path: Path) -> None:
    """Oracle: the steps before the failure, of which the last two were not due to be read, nor ended on the device."""
    run_npu_ranks(2, fail, tmp_path, mode="delayed")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
