"""The trainer's memory on a CPU: as counted, as planned, and in the report of an out-of-memory
error."""

import functools
import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB, Device
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics import StepMetrics
from fsdptoys.parallel import DDPConfig, FSDP2Config, SingleConfig
from fsdptoys.parallel.ddp import DDP
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from fsdptoys.profiler import ExplainedOutOfMemoryError, live_bytes
from fsdptoys.train.oom_context import oom_context
from fsdptoys.train.step_memory import COST, StepMemory
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import LAZY, SMALL, run_to_the_end, with_checkpoints
from tests.harness.tiny import make_config
from tests.harness.traced_runs import configured, traced

SHARED = (
    "model=llama_debug",
    "model.vocab_size=2048",
    "train.steps=2",
    "train.eval_every=0",
    "launch.device=cpu",
)
SERIAL = ("memory.optimizer_offload=true", "memory.offload_schedule=serial")
CASES: dict[str, tuple[str, ...]] = {
    "fsdp2": (),
    "checkpointing": ("memory.gradient_checkpointing=full",),
    "chunked loss": ("memory.chunk_loss=true", "memory.chunk_tokens=256"),
    "optimizer offload": SERIAL,
    "cpu offload": ("memory.cpu_offload=true",),
    "ddp": ("parallel=ddp",),
}
TOLERANCE = 0.02
"""Relative difference from the plan, which rounds blocks up to 512 bytes and has no scratch memory
of kernels."""

BUFFER_BYTES = 2 * 2048 * 64 * 4
"""Embedding and head: a thread of gloo's, whose frees are not recorded, may hold a gathered buffer
last."""


def train(overrides: tuple[str, ...], counts: bool = True) -> list[StepMetrics]:
    gc.collect()  # a trainer's hooks are cycles, and the memory of the last one would count
    trainer = Trainer(configured([*SHARED, *overrides], 2, "cpu"), Device("cpu"))
    if not counts:
        trainer.memory = StepMemory(trainer.strategy, trainer.stepper, enabled=False)
    trainer.train()
    return trainer.history


def train_all() -> tuple[dict[str, StepMetrics], list[list[float]]]:
    last_steps = {name: train(overrides)[-1] for name, overrides in CASES.items()}
    losses = [
        [metrics.loss, metrics.grad_norm]
        for counts in (True, False)
        for metrics in train((), counts)
    ]
    return last_steps, losses


@functools.cache
def trained() -> Any:
    """Each rank's last metrics of every case, in one process group."""
    return run_ranks(2, train_all)


def test_each_switch_changes_the_memory_as_it_should() -> None:
    """Oracle: the purpose of each switch; bytes of parameters and states from the shapes of all
    ranks."""
    rows: dict[str, StepMetrics] = trained()[0][0]
    plain = rows["fsdp2"]
    ddp = rows["ddp"]
    counts = (
        configured([*SHARED], 2, "cpu").model.build().parameter_counts().total * 4 / GIB
    )

    def peak(name: str) -> float:
        return rows[name].memory_peak_gib or 0.0

    def end(name: str) -> float:
        return rows[name].memory_allocated_gib or 0.0

    assert plain.memory_parameters_gib == pytest.approx(counts / 2, rel=0.01)
    assert plain.memory_optimizer_gib == pytest.approx(counts, rel=0.01)
    assert ddp.memory_parameters_gib == pytest.approx(counts, rel=0.001)
    assert ddp.memory_optimizer_gib == pytest.approx(2 * counts, rel=0.001)
    lost = BUFFER_BYTES / GIB + 0.01 * counts
    assert 1.49 * counts < end("fsdp2") < 1.5 * counts + lost
    assert peak("checkpointing") < 0.95 * peak("fsdp2") and peak(
        "chunked loss"
    ) < 0.95 * peak("fsdp2")
    assert peak("ddp") > peak("fsdp2") + counts and end("ddp") >= 2.9 * counts
    offloaded = rows["optimizer offload"]
    on_host = rows["cpu offload"]
    assert 0.49 * counts < end("optimizer offload") < counts / 2 + lost
    assert offloaded.memory_host_gib == pytest.approx(counts, rel=0.01)
    assert end("cpu offload") < lost
    assert on_host.memory_host_gib == pytest.approx(1.5 * counts, rel=0.01)
    for name, row in rows.items():
        parts = (
            row.memory_parameters_gib,
            row.memory_gradients_gib,
            row.memory_optimizer_gib,
            row.memory_rest_gib,
        )
        assert sum(part or 0.0 for part in parts) == pytest.approx(
            peak(name), rel=1e-12
        ), name
        assert row.memory_counted_step == 2 and row.memory_reserved_gib is None


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "case",
    [
        "fsdp2",
        *(
            pytest.param(case, marks=pytest.mark.extended)
            for case in ("checkpointing", "ddp")
        ),
    ],
)
def test_counted_memory_is_the_planned_one(case: str) -> None:
    """Oracle: the replayed trace of the same steps, made for a CPU."""
    row: StepMetrics = trained()[0][0][case]
    trace = traced([*SHARED, *CASES[case]], 2, "cpu")
    memory = replay(
        trace,
        load_hardware("cpu"),
        build_allocator(AllocatorKind.native, device_type="cpu"),
    ).memory()
    assert row.memory_peak_gib is not None and row.memory_allocated_gib is not None
    for counted, planned in (
        (row.memory_peak_gib, memory.peak_bytes),
        (row.memory_allocated_gib, memory.end_bytes),
    ):
        assert (
            (1 - TOLERANCE) * planned
            < counted * GIB
            < (1 + TOLERANCE) * planned + BUFFER_BYTES
        )


def test_counting_changes_no_bit_and_only_rank_0_counts() -> None:
    """Oracle: the same steps without counting; metrics of rank 1."""
    (rows, losses), (others, _) = trained()
    assert losses[:2] == losses[2:]
    assert (
        rows["fsdp2"].memory_peak_gib is not None
        and others["fsdp2"].memory_peak_gib is None
    )


def memory_of(device: Device) -> StepMemory:
    world: Any = SimpleNamespace(device=device, cpu_offload=False)
    strategy: Any = SimpleNamespace(world=world)
    stepper: Any = None
    return StepMemory(strategy, stepper, enabled=True)


def test_counts_cost_at_most_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the definition: the first two steps, then one when steps have lasted 50 times as long
    as a count."""
    device = Device("cpu")
    memory = memory_of(device)
    monkeypatch.setattr(StepMemory, "_labels", lambda self: {})
    counted = []
    for step in range(1, 60):
        with memory.around(step, lambda step: step == 3):
            if memory._count is not None:
                counted.append(step)
            memory.end_step(step, 0.1)
        if step in counted:
            # that of a count, as if it had taken as long
            memory.cost_seconds = 20 * 0.1 * COST
    assert counted == [1, 2, 23, 44]
    with memory.around(60, lambda step: False):
        assert memory._count is None
    device.reset_peak_memory()
    with memory.around(61, lambda step: False):
        assert memory._count is not None
    assert memory._count is None


def test_other_profilers_than_those_tried_leave_steps_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: a PyTorch without one of the private functions; the step runs, and no later one asks
    again."""
    monkeypatch.delattr(torch._C._autograd, "_prepare_profiler")
    monkeypatch.setattr(StepMemory, "_labels", lambda self: {})
    memory = memory_of(Device("cpu"))
    steps = []
    for step in (1, 2):
        with memory.around(step, lambda step: False):
            steps.append(step)
        memory.end_step(step, 0.1)
    assert (steps, memory.enabled, memory.counted_step) == ([1, 2], False, None)


def run_out_of_memory(config: Config, part: str) -> str:
    """The report of a run that runs out of memory in a part of its second step."""
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

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ExplainedOutOfMemoryError) as caught,
    ):
        patch.setattr(owner, name, greedy)
        trainer.train()
    return str(caught.value)


def run_out_of_memory_in(config: Config, parts: Sequence[str]) -> list[str]:
    return [run_out_of_memory(config, part) for part in parts]


def construct_out_of_memory(configs: Sequence[Config]) -> list[str]:
    def refuse(*_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    FSDP2.shard = DDP.shard = refuse  # type: ignore[method-assign]
    reports = []
    for config in configs:
        with pytest.raises(ExplainedOutOfMemoryError) as caught:
            Trainer(config)
        reports.append(str(caught.value))
    return reports


def test_out_of_memory_in_construction_reports_the_planned_bytes() -> None:
    """Oracle: four bytes a parameter, over the ranks that share them; sharding is advised where
    there is none."""
    configs = [make_config(parallel, 2) for parallel in (DDPConfig(), FSDP2Config())]
    total = sum(param.numel() for param in configs[0].model.build().parameters())
    for share, report in zip(
        (1, 2), run_ranks(2, construct_out_of_memory, configs)[0], strict=True
    ):
        assert "ran out on rank 0 in the construction\n" in report
        assert (
            f"{4 * total / share / 2**10:.2f} KiB  parameters, when complete" in report
        )
        assert ("parallel=fsdp2 mesh.fsdp_size=-1" in report) == (share == 1)


def memory_of_a_lazy_run(config: Config) -> tuple[int, int]:
    """Bytes of gradients in the report after a deferred step, and of the local parameters."""
    trainer = Trainer(config)
    trainer.train_step(1)
    parameters = live_bytes(
        (param for _, param in trainer.strategy.named_parameters()), None
    ).parameters
    context = oom_context(
        trainer.config, trainer.strategy, trainer.stepper, 2, "forward"
    )
    return context.live.gradients.host_bytes, parameters.host_bytes


def test_gradients_of_deferred_steps_count_as_gradients() -> None:
    """Oracle: the bytes of the parameters."""
    gradients, parameters = run_ranks(
        1, memory_of_a_lazy_run, make_config(SingleConfig(), 1, memory=LAZY)
    )[0]
    assert gradients == parameters > 0


def test_out_of_memory_reports_phase_live_bytes_and_advice() -> None:
    """Oracle: a failed allocation of 1 PiB in that part; activations are live in forward and
    backward only."""
    parts = ("forward", "backward", "optimizer", "evaluation")
    config = make_config(FSDP2Config(), 2, grad_accum=1, eval_every=2)
    for part, report in zip(
        parts, run_ranks(2, run_out_of_memory_in, config, parts)[1], strict=True
    ):
        assert f"on rank 1 in the {part} of step 2\n1024.00 TiB asked for" in report
        assert "optimizer states" in report
        assert ("memory.chunk_loss=true" in report) == (part in ("forward", "backward"))


def train_and_save(
    folder: str, background: bool, every: int
) -> tuple[list[Any], list[Any]]:
    """Memory at the end of each step, and at its peak, of a run that saves."""
    config = with_checkpoints(
        make_config(SingleConfig(), 1, **{**SMALL, "steps": 6}),
        Path(folder),
        every,
        async_save=background,
        keep=6,
    )
    gc.collect()
    history = run_to_the_end(config, count_every_step).history
    return [metrics.memory_allocated_gib for metrics in history], [
        metrics.memory_peak_gib for metrics in history
    ]


def count_every_step(trainer: Trainer) -> None:
    trainer.memory.is_due = lambda: True  # type: ignore[method-assign]


@pytest.mark.parametrize("background", [False, True])
def test_saving_and_loading_do_not_change_the_counted_memory(
    background: bool, tmp_path: Path
) -> None:
    """Oracle: the run that saves after its last step only; a run that resumes from its third
    step."""
    ((ends, peaks),) = run_ranks(1, train_and_save, str(tmp_path / "plain"), False, 6)
    (saving,) = run_ranks(1, train_and_save, str(tmp_path / "run"), background, 1)
    # the saving thread takes a few bytes
    about = functools.partial(pytest.approx, rel=1e-3)
    assert saving == (about(ends), about(peaks))
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    ((resumed, _),) = run_ranks(1, train_and_save, str(tmp_path / "run"), background, 1)
    assert resumed == about(ends[3:])
