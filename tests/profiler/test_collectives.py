"""The trace of a step's collectives, compared with the communication formulas of each strategy."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.metrics import Console
from fsdptoys.parallel import STRATEGIES, ParallelConfig
from fsdptoys.profiler.collective_table import render
from fsdptoys.profiler.collectives import Call, CollectiveTrace, ring_bytes, traced_step
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, tiny_model

LAYERS = tiny_model().n_layers
UNITS = LAYERS + 2
"""Of FSDP: embedding, blocks, head with norm."""
STEPS = {
    "steps": 3,
    "seq_len": 8,
    "batch_size": 1,
    "deterministic": False,
    "grad_accum": 1,
}
PLAIN = (
    "ddp",
    "fsdp1",
    "fsdp2",
    "toy_ddp",
    "toy_zero1",
    "toy_zero2",
    "toy_zero3",
    "toy_fsdp",
)
CASES: dict[str, dict[str, Any]] = {name: {} for name in PLAIN}
CASES["ddp deterministic"] = {"deterministic": True, "grad_accum": 2}
CASES["toy_fsdp twice"] = CASES["toy_zero2 twice"] = {"grad_accum": 2}
"""Strategy and, behind a space, what differs → settings."""


def parallel_of(label: str) -> ParallelConfig:
    return STRATEGIES[label.split()[0]]()


def train_traced(
    folder: Path, cases: dict[str, dict[str, Any]], traces: bool
) -> list[Any]:
    """Train each case with or without the trace; return its losses, and on rank 0 the file's
    content."""
    outcomes: list[Any] = []
    for label, more in cases.items():
        config = make_config(
            parallel_of(label), dist.get_world_size(), **{**STEPS, **more}
        )
        config.debug.trace_collectives = traces
        config.metrics.console = Console.none
        config.metrics.run_dir = str(folder / label)
        trainer = Trainer(config)
        Run(trainer).run()
        file = folder / label / "collectives.jsonl"
        lines = (
            file.read_text().splitlines()
            if file.exists() and trainer.world.rank == 0
            else None
        )
        elements = {
            name: param.numel() for name, param in trainer.strategy.full_parameters()
        }
        outcomes.append(([step.loss for step in trainer.history], lines, elements))
    return outcomes


def train_both(folder: Path) -> list[Any]:
    return [
        train_traced(folder / str(traces), CASES, traces) for traces in (False, True)
    ]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[Call], list[float], list[float], Any]]:
    """Label → calls of the traced step, losses without and with the trace, elements of each
    parameter."""
    plain, traced = run_ranks(2, train_both, tmp_path_factory.mktemp("runs"))[0]
    outcomes_by_label = {}
    for label, (losses, no_lines, _), (traced_losses, lines, elements) in zip(
        CASES, plain, traced, strict=True
    ):
        assert no_lines is None, "no file without the switch"
        rows = [json.loads(line) for line in lines]
        assert {row.pop("step") for row in rows} == {3}
        outcomes_by_label[label] = (
            [Call(**row) for row in rows],
            losses,
            traced_losses,
            elements,
        )
    return outcomes_by_label


@pytest.mark.parametrize("label", CASES)
def test_tracing_does_not_change_losses(outcomes: Any, label: str) -> None:
    """Oracle: the same run without the trace."""
    _, plain, traced, _ = outcomes[label]
    assert plain == traced


def total(calls: list[Call], collective: str, phase: str | None = None) -> int:
    return sum(
        call.size_bytes
        for call in calls
        if call.collective == collective and phase in (None, call.phase)
    )


def count_names(calls: list[Call], collective: str, phase: str) -> Counter[str]:
    return Counter(
        name
        for call in calls
        if (call.collective, call.phase) == (collective, phase)
        for name in call.parameters
    )


@pytest.mark.parametrize("label", ["ddp", "toy_ddp", "toy_zero1"])
def test_ddp_all_reduces_every_gradient_once(outcomes: Any, label: str) -> None:
    """Oracle: 4 bytes a parameter, each parameter in one all-reduce of the backward; also those of
    DDP's C++."""
    calls, _, _, elements = outcomes[label]
    assert total(calls, "all_reduce", "backward") == 4 * sum(elements.values())
    assert count_names(calls, "all_reduce", "backward") == Counter(list(elements))


@pytest.mark.parametrize(
    ("label", "backwards"), [("toy_zero1", 0), ("toy_zero2", 1), ("toy_zero2 twice", 2)]
)
def test_zero1_and_zero2_gather_parameters_after_the_optimizer_step(
    outcomes: Any, label: str, backwards: int
) -> None:
    """Oracle: the pages of ZeRO-1 and -2: 4 bytes per parameter, and padding below one element per
    rank and bucket."""
    calls, _, _, elements = outcomes[label]
    whole = 4 * sum(elements.values())
    for collective, phase, times in (
        ("all_gather", "optimizer", 1),
        ("reduce_scatter", "backward", backwards),
    ):
        matches = [call for call in calls if call.collective == collective]
        assert {call.phase for call in matches} == ({phase} if times else set())
        assert (
            times * whole
            <= total(calls, collective)
            < times * whole + 8 * max(1, len(matches))
        )
        assert set(count_names(calls, collective, phase).values()) == (
            {times} if times else set()
        )


def test_zero3_broadcasts_blocks_twice_and_other_parameters_once(outcomes: Any) -> None:
    """Oracle: the page of ZeRO-3; owners broadcast their parameters and receive their reduced
    gradients."""
    calls, _, _, elements = outcomes["toy_zero3"]
    blocks = {
        name: size for name, size in elements.items() if name.startswith("layers.")
    }
    assert (
        total(calls, "broadcast", "forward")
        == total(calls, "reduce", "backward")
        == 4 * sum(elements.values())
    )
    assert total(calls, "broadcast", "backward") == 4 * sum(blocks.values())
    assert (
        count_names(calls, "broadcast", "forward")
        == count_names(calls, "reduce", "backward")
        == Counter(list(elements))
    )
    assert count_names(calls, "broadcast", "backward") == Counter(list(blocks))
    owned = {
        call.size_bytes
        for call in calls
        if call.collective == "broadcast" and call.gives_bytes
    }
    reduced = {
        call.size_bytes
        for call in calls
        if call.collective == "reduce" and call.gets_bytes
    }
    assert owned == reduced
    for call in calls:
        if call.collective == "broadcast":
            assert sorted((call.gives_bytes, call.gets_bytes)) == [0, call.size_bytes]


@pytest.mark.parametrize("label", ["fsdp2", "toy_fsdp", "fsdp1"])
def test_fsdp_gathers_units_in_forward_and_backward_and_reduces_them_once(
    outcomes: Any, label: str
) -> None:
    """Oracle: the units; the head stays gathered for the backward, and FSDP2's embedding is not
    needed there."""
    calls, _, _, elements = outcomes[label]
    counts = Counter((call.phase, call.collective) for call in calls)
    root = label == "fsdp1"  # a unit of its own, of the norm alone
    assert (
        counts["forward", "all_gather"]
        == counts["backward", "reduce_scatter"]
        == UNITS + root
    )
    # FSDP1 gathers the embedding again
    assert counts["backward", "all_gather"] == LAYERS + root
    assert count_names(calls, "all_gather", "forward") == Counter(list(elements))
    assert count_names(calls, "reduce_scatter", "backward") == Counter(list(elements))
    for call in calls:
        if call.collective in ("all_gather", "reduce_scatter"):
            least = 4 * sum(elements[name] for name in call.parameters)
            # Padding: of each parameter less than a row a rank, none over 50 elements wide.
            assert least <= call.size_bytes < least + 2 * 4 * 50 * len(call.parameters)
            part, whole = sorted((call.gives_bytes, call.gets_bytes))
            assert 2 * part == whole == call.size_bytes


def test_toy_fsdp_issues_the_collectives_of_fsdp2_in_order(outcomes: Any) -> None:
    """Oracle: PyTorch's FSDP2, which calls them from other functions."""
    toy, native = (
        [
            (call.phase, call.collective, call.size_bytes, sorted(call.parameters))
            for call in outcomes[label][0]
        ]
        for label in ("toy_fsdp", "fsdp2")
    )
    assert toy == native


@pytest.mark.parametrize("label", ["ddp deterministic", "toy_fsdp twice"])
def test_collectives_are_assigned_to_their_micro_batch(
    outcomes: Any, label: str
) -> None:
    """Oracle: the deterministic mode reduces float64 after each; otherwise only the last one is
    reduced."""
    calls, _, _, elements = outcomes[label]
    reductions = [
        call
        for call in calls
        if call.phase == "backward" and "reduce" in call.collective
    ]
    if label == "toy_fsdp twice":
        assert {call.microbatch for call in reductions} == {2}
        gathers = Counter(
            call.microbatch for call in calls if call.collective == "all_gather"
        )
        assert gathers == {1: UNITS + LAYERS, 2: UNITS + LAYERS}
    else:
        assert [(call.microbatch, call.dtype) for call in reductions] == [
            (1, "float64"),
            (2, "float64"),
        ]
        assert [call.size_bytes for call in reductions] == [
            8 * sum(elements.values())
        ] * 2


@pytest.mark.parametrize("label", CASES)
def test_trainer_collectives_are_labeled_with_phase_and_call_site(
    outcomes: Any, label: str
) -> None:
    """Oracle: the trainer: the count of labels, the norm of shards, and the loss are reduced."""
    small = [
        (call.phase, call.site) for call in outcomes[label][0] if not call.parameters
    ]
    clips = [("clip", "strategy.total_norm")] if "ddp" not in label else []
    assert small == [
        ("other", "trainer.train_step"),
        *clips,
        ("other", "step_readings.agree"),
    ]


def test_one_rank_sends_no_bytes(tmp_path: Path) -> None:
    """Oracle: one process sends no bytes, although it calls the same collectives."""
    _, lines, _ = run_ranks(1, train_traced, tmp_path, {"single": {}}, True)[0][0]
    rows = [json.loads(line) for line in lines]
    assert {row["ranks"] for row in rows} == {1} and {
        row["sends_bytes"] for row in rows
    } == {0}
    calls = [
        Call(**{key: value for key, value in row.items() if key != "step"})
        for row in rows
    ]
    assert (
        render(calls, "step 3")
        == "step 3: none but 2 calls over groups of one rank, which send nothing"
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring_bytes_follow_the_documented_formulas(ranks: int) -> None:
    """Oracle: an all-reduce is a reduce-scatter and an all-gather; in a broadcast all ranks but one
    receive all."""
    size = 840
    scatter, gather = (
        ring_bytes(kind, size, ranks) for kind in ("reduce_scatter", "all_gather")
    )
    assert (
        ring_bytes("all_reduce", size, ranks)
        == scatter + gather
        == 2 * size * (ranks - 1) / ranks
    )
    assert ranks * ring_bytes("broadcast", size, ranks) == pytest.approx(
        (ranks - 1) * size
    )
    assert ranks * ring_bytes("gather", size, ranks) == pytest.approx(
        (ranks - 1) * size / ranks
    )


@pytest.mark.parametrize(
    ("first", "last", "step"), [(1, 10, 3), (1, 2, 2), (1, 1, 1), (7, 20, 9)]
)
def test_third_or_last_step_is_traced(first: int, last: int, step: int) -> None:
    """Oracle: hand-computed values."""
    assert traced_step(first, last) == step


def functional_calls() -> list[tuple[str, int, int, int]]:
    recorded_calls: list[Call] = []
    trace = CollectiveTrace(1, torch.nn.Linear(1, 1), {}, recorded_calls.extend)
    group = dist.distributed_c10d._get_default_group().group_name
    ops = torch.ops._c10d_functional
    with trace.around(1):
        part = torch.ones(6)
        ops.wait_tensor(ops.all_gather_into_tensor(part, 2, group))
        ops.wait_tensor(ops.reduce_scatter_tensor(part, "sum", 2, group))
        ops.wait_tensor(ops.all_reduce(part, "sum", group))
        dist.all_to_all_single(torch.empty(6), part)
        dist.barrier()
        parts = [torch.empty(6), torch.empty(6)]
        dist.all_gather(parts, part)
    return [
        (call.collective, call.size_bytes, call.gives_bytes, call.gets_bytes)
        for call in recorded_calls
    ]


def test_functional_and_list_collectives_are_recognized() -> None:
    """Oracle: sizes by hand, of the functional ones as of those over lists."""
    expected = [
        ("all_gather", 48, 24, 48),
        ("reduce_scatter", 24, 24, 12),
        ("all_reduce", 24, 24, 24),
        ("all_to_all", 24, 24, 24),
        ("barrier", 0, 0, 0),
        ("all_gather", 48, 24, 48),
    ]
    assert run_ranks(2, functional_calls)[0] == expected
