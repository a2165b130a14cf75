"""Steps of an accelerator; their numbers are read after the host has launched more work."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdptoys.config.schema import Config, SumDType
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim import AdamWConfig, Implementation, SGDConfig, fused_adamw
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.precision import DType
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from tests.harness.levels import by_level
from tests.harness.outcomes import hash_parameters
from tests.harness.resumed_runs import (
    poison_gradients,
    run_to_the_end,
    run_until,
    steps_of,
    with_checkpoints,
)
from tests.harness.tiny import DOCUMENTS, EVEN, TINY, make_config, tiny_model
from tests.simulated_npu.ranks import run_npu_ranks, simulated_npu

STEPS = 5
FIRST = 3
"""The first step that is counted: optimizer states and buffers exist."""

UNLOGGED: dict[str, Any] = {"skip_nonfinite": False}
FUSED = AdamWConfig(implementation=Implementation.fused)
CHECKPOINTING = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
ROWS: dict[str, tuple[int, ParallelConfig, dict[str, Any]]] = {
    "single": (1, SingleConfig(), {}),
    "ddp": (2, DDPConfig(), {}),
    "fsdp1": (2, FSDP1Config(), {}),
    "fsdp2": (2, FSDP2Config(), {}),
    "hsdp2": (4, FSDP2Config(), {"fsdp_size": 2}),
    "fsdp2, chunked loss": (
        2,
        FSDP2Config(),
        {"memory": MemoryConfig(chunk_loss=True, chunk_tokens="20")},
    ),
    "fsdp2, checkpointing": (2, FSDP2Config(), {"memory": CHECKPOINTING}),
    "fsdp2, experts": (2, FSDP2Config(), {"model": TINY["qwen3_moe"]}),
    "fsdp2, documents": (2, FSDP2Config(), {"data": DOCUMENTS}),
    "fsdp2, accumulation": (2, FSDP2Config(), {"grad_accum": 4}),
    "fsdp2, bf16": (2, FSDP2Config(param_dtype=DType.bfloat16), {}),
    "fsdp2, fused": (2, FSDP2Config(), {"optim": FUSED}),
    "fsdp2, float16": (2, FSDP2Config(param_dtype=DType.float16), {}),
    "fsdp2, adapters": (2, FSDP2Config(), {"tune": LoRAConfig(rank=4, dropout=0.2)}),
    "fsdp2, shared sequences": (2, FSDP2Config(), {"cp_size": 2}),
    "fsdp2, split features": (
        2,
        FSDP2Config(),
        {"tp_size": 2, "model": replace(tiny_model(), **EVEN)},
    ),
    "single, no skipping": (1, SingleConfig(), UNLOGGED),
    "ddp, no skipping": (2, DDPConfig(), UNLOGGED),
    "fsdp2, no skipping": (2, FSDP2Config(), UNLOGGED),
    "fsdp2, experts, no skipping": (
        2,
        FSDP2Config(),
        {"model": TINY["qwen3_moe"], **UNLOGGED},
    ),
    "fsdp2, accumulation, no skipping": (
        2,
        FSDP2Config(),
        {"grad_accum": 4, **UNLOGGED},
    ),
}
"""Kind of run → ranks, strategy and settings."""


def count_waits(name: str) -> list[Counter[str]]:
    """Return the calls of each counted step on rank 0; an entry names the call and the function
    that made it.

    They are reads of numbers, blocking copies, and synchronizations of streams, events and the
    device, which notes them where PyTorch asks it, in Python and in C++ alike. PyTorch's own are
    left out: FSDP1 limits by events how far the host runs ahead.
    """
    ranks, parallel, options = ROWS[name]
    common: dict[str, Any] = {
        "deterministic": False,
        "sum_dtype": SumDType.float32,
        "grad_accum": 1,
        "steps": STEPS,
    }
    config = make_config(parallel, ranks, device="npu", **{**common, **options})
    config = replace(config, metrics=replace(config.metrics, log_every=100))

    def count() -> list[Counter[str]]:
        extension = simulated_npu.extension
        # As in config_of
        fused_adamw.IGNORED_ON = frozenset()
        trainer = Trainer(config)
        steps: list[Counter[str]] = []

        def on_phase(step: int, phase: str) -> None:
            # the calls of a step are those up to the next one's beginning
            if phase == "data":
                callers = [
                    (wait["call"], caller_of(wait["frames"]))
                    for wait in extension.take_waits()
                ]
                calls = Counter(
                    f"{call} in {caller}"
                    for call, caller in callers
                    if "distributed/fsdp/" not in caller
                )
                if step > FIRST:
                    steps.append(calls)

        trainer.on_phase = on_phase
        extension.record_waits(True)
        trainer.train()
        return steps

    return run_npu_ranks(ranks, count)[0]


def caller_of(frames: list[dict[str, Any]]) -> str:
    """Return the innermost function of this project, of PyTorch's FSDP, or of the optimizer."""
    for frame in frames:
        path = frame["filename"]
        for folder in ("fsdptoys/", "torch/distributed/fsdp/", "torch/optim/"):
            if folder in path:
                return f"{folder}{path.rpartition(folder)[2]}:{frame['name']}"
    return "C++"


SHORT = {
    "single",
    "fsdp1",
    "fsdp2",
    "fsdp2, experts",
    "fsdp2, fused",
    "fsdp2, float16",
    "fsdp2, no skipping",
}


@pytest.mark.parametrize("name", by_level(ROWS, SHORT))
def test_a_step_waits_for_the_device_at_most_once(name: str) -> None:
    """Oracle: calls noted by the device; none without skipping. Experts one by one read their
    counts themselves."""
    steps = count_waits(name)
    calls = [
        sum(times for call, times in step.items() if "grouped.py" not in call)
        for step in steps
    ]
    assert calls == [0 if "no skipping" in name else 1] * 2, steps


def config_of(log_every: int = 10, **options: Any) -> Config:
    settings = {
        "optim": SGDConfig(lr=0.1, momentum=0.0),
        "deterministic": False,
        "sum_dtype": SumDType.float32,
    }
    # The simulated kernel is the CPU's, which skips as CUDA's does
    fused_adamw.IGNORED_ON = frozenset()
    config = make_config(
        FSDP2Config(), 2, device="npu", seq_len=8, **{**settings, **options}
    )
    return replace(config, metrics=replace(config.metrics, log_every=log_every))


def read_after(trainer: Trainer, **arguments: Any) -> tuple[list[tuple[int, int]], str]:
    """Train; return each recorded step with the number of steps launched by then, and the reason
    for the end."""
    records: list[tuple[int, int]] = []
    stop = trainer.train(
        lambda metrics: records.append((metrics.step, trainer.steps_done)), **arguments
    )
    return records, stop.reason


def limited() -> tuple[list[tuple[int, int]], str]:
    """Train to the limit of skipped steps."""
    trainer = Trainer(config_of(steps=8, max_skipped_in_a_row=3, optim=FUSED))
    hashes: dict[int, dict[str, str]] = {}
    poison_gradients(
        trainer,
        {2, 3, 4, 5, 6},
        1,
        lambda step: hashes.update({step: hash_parameters(trainer)}),
    )
    read = read_after(trainer)
    counts = [(step.skipped, step.skipped_steps) for step in trainer.history]
    assert counts == [(False, 0), (True, 1), (True, 2), (True, 3), (True, 4)]
    assert hash_parameters(trainer) == hashes[2], (
        "a skipped step changed the parameters"
    )
    return read


def signalled(config: Config, step: int) -> tuple[list[tuple[int, int]], str]:
    """Train, with a signal to rank 1 before a step."""
    trainer = Trainer(config)
    request = SimpleNamespace(received=None)

    def on_phase(now: int, phase: str) -> None:
        if now == step and trainer.world.rank == 1:
            request.received = "SIGTERM"

    trainer.on_phase = on_phase
    return read_after(trainer, request=request)


REACHED = (
    "3 steps in a row had a non-finite loss or gradients (train.max_skipped_in_a_row=3)"
)
READS: dict[
    str,
    tuple[Callable[[], tuple[list[tuple[int, int]], str]], list[tuple[int, int]], str],
] = {
    # Step 4 reaches the limit, and step 5 is launched when it is read. A record follows the launch
    # of ``steps_done``.
    "limit": (limited, [(1, 2), (2, 3), (3, 4), (4, 5), (5, 5)], REACHED),
    "on device": (
        lambda: signalled(config_of(steps=8, optim=FUSED), 3),
        [(1, 2), (2, 3), (3, 4), (4, 4)],
        "SIGTERM received",
    ),
    "on host": (
        lambda: signalled(config_of(steps=8), 3),
        [(1, 2), (2, 3), (3, 3)],
        "SIGTERM received",
    ),
    "unskipped": (
        lambda: signalled(config_of(4, steps=12, **UNLOGGED), 2),
        [(1, 2), (2, 5), (3, 5), (4, 5), (5, 5)],
        "SIGTERM received",
    ),
    "unsignalled": (
        lambda: read_after(Trainer(config_of(3, steps=8, **UNLOGGED))),
        [(1, 2), (2, 4), (3, 4), (4, 7), (5, 7), (6, 7), (7, 8), (8, 8)],
        "all steps done",
    ),
    "evaluated": (
        lambda: read_after(
            Trainer(config_of(5, steps=4, eval_every=3, eval_batches=1, **UNLOGGED))
        ),
        [(1, 2), (2, 3), (3, 3), (4, 4)],
        "all steps done",
    ),
}
"""Case → its run, the records with the steps launched by then, and the reason for the end."""


@pytest.mark.parametrize(
    "case", by_level(READS, READS.keys() - {"unsignalled", "evaluated"})
)
def test_steps_are_read_once_in_order_and_stops_come_at_most_one_read_later(
    case: str,
) -> None:
    """Oracle: the documented step of each read, on both ranks, with streams that work only when
    they are waited for."""
    run, records, reason = READS[case]
    assert run_npu_ranks(2, run, mode="delayed") == [(records, reason)] * 2


@pytest.mark.extended
def test_checkpoint_has_the_counts_of_its_step_and_resumes_bitwise(
    tmp_path: Path,
) -> None:
    """Oracle: the uninterrupted run, with a skipped step just before the checkpoint."""

    def resume() -> tuple[str, str]:
        """Return the parameters of a whole run, and of one killed in step 6 and resumed from step
        4."""
        whole, killed = (
            with_checkpoints(config_of(steps=8, optim=FUSED), tmp_path / name, every=4)
            for name in ("whole", "killed")
        )
        run_until(killed, 6, lambda trainer: poison_gradients(trainer, {4, 7}, 1))
        trainers = [
            run_to_the_end(config, lambda trainer: poison_gradients(trainer, {4, 7}, 1))
            for config in (whole, killed)
        ]
        return hash_parameters(trainers[0]), hash_parameters(trainers[1])

    whole, killed = run_npu_ranks(2, resume)[0]
    assert whole == killed
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "killed")
    assert [step[-1] for step in steps_of(tmp_path / "whole")] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
    ]


def test_run_that_fails_records_the_steps_that_were_launched(tmp_path: Path) -> None:
    """Oracle: the steps before the failure; the last two were not due to be read, nor
    ended on the device."""

    def fail() -> None:
        trainer = Trainer(
            with_checkpoints(config_of(4, steps=8, **UNLOGGED), tmp_path, every=0)
        )
        next_step = trainer.data.batches.next_step

        def failing() -> Any:
            if trainer.steps_done == 3:
                raise KeyboardInterrupt
            return next_step()

        trainer.data.batches.next_step = failing
        with pytest.raises(KeyboardInterrupt):
            Run(trainer).run()

    run_npu_ranks(2, fail, mode="delayed")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
