"""A rank's work in a step does not depend on the world size: counted for 8 and for about 1000
ranks.

Ranks of large worlds are alone here, in a process group with collectives that do nothing
(``step_counts.py`` of ``scripts/benchmarks``). Not covered so: DDP, since its reducer wants an
answer; and FSDP1 over all ranks on a CPU, since PyTorch itself gathers there with a list of
tensors, one a rank.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.metrics.prediction import Volume
from fsdptoys.profiler.collectives import CollectiveTrace
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.benchmarks import bench_scaling
from scripts.benchmarks.step_counts import configured, count_step
from tests.harness.ranks import run_ranks

SMALL = [
    "model=llama_debug",
    "train.batch_size=1",
    "train.seq_len=16",
    "optim.implementation=foreach",
]
HYBRID = ["mesh.fsdp_size=node", *SMALL]
OFFLOAD = [
    "train.deterministic=true",
    "train.grad_accum=2",
    "memory.optimizer_offload=true",
    "memory.chunk_loss=true",
]
EXPERTS = [
    "mesh.fsdp_size=node",
    "model=qwen3_moe_debug",
    *SMALL[1:-1],
    "optim=muon",
    SMALL[-1],
]

STEPS = {
    "fsdp2, hybrid": (HYBRID, 16, 1024),
    "fsdp2, all ranks": (SMALL, 8, 64),
    "fsdp2, deterministic, offload": ([*HYBRID, *OFFLOAD], 16, 1024),
    "fsdp2, Muon, experts": (EXPERTS, 16, 1024),
    "fsdp1, hybrid": ([*HYBRID, "parallel=fsdp1"], 16, 1024),
    "toy_ddp": ([*SMALL, "parallel=toy_ddp"], 8, 1024),
    "toy_zero1": ([*SMALL, "parallel=toy_zero1"], 8, 1024),
}
"""Name → overrides, and two world sizes with equal shards per rank."""


def numbers_of_a_step(
    overrides: Sequence[str], world_size: int
) -> tuple[dict[str, int], dict[str, int], list[Any]]:
    counted, collectives, _ = count_step(overrides, world_size)
    listed = [(call.phase, call.collective, call.size_bytes) for call in collectives]
    return dict(counted.lines), dict(counted.calls), listed


def differences(
    some: dict[str, int], others: dict[str, int]
) -> dict[str, tuple[int | None, int | None]]:
    return {
        key: (some.get(key), others.get(key))
        for key in some | others
        if some.get(key) != others.get(key)
    }


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", STEPS)
def test_work_of_a_step_does_not_depend_on_the_world_size(name: str) -> None:
    """Oracle: the smaller world: lines of ours that ran, function by function, calls of any Python
    function, and the collectives with their sizes."""
    overrides, small, large = STEPS[name]
    ((few, calls, collectives),) = run_ranks(1, numbers_of_a_step, overrides, small)
    ((many, more_calls, more_collectives),) = run_ranks(
        1, numbers_of_a_step, overrides, large
    )
    assert differences(few, many) == differences(calls, more_calls) == {}
    assert sum(calls.values()) > 1000 and sum(few.values()) > 500
    # Parameters are padded to a multiple of the number of ranks
    if "mesh.fsdp_size=node" not in overrides:
        collectives, more_collectives = (
            [call[:2] for call in listed] for listed in (collectives, more_collectives)
        )
    assert collectives == more_collectives
    assert len(collectives) > 2


def numbers_of_a_save(config: Config) -> tuple[list[str], list[str]]:
    """Collectives of a rank's second save, and the files that it opens, without its own number."""
    run = Run(Trainer(config))
    save = run._save
    opened = []
    calls = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(args[0], (str, os.PathLike)):
            path = Path(args[0])
            if "checkpoints" in path.parts:
                opened.append(path.name.replace(f"{run.rank:05d}", "N"))

    def watched(stop: Any) -> None:
        nonlocal watching
        if run.trainer.steps_done != 2:
            save(stop)
            return
        watching = True
        trace = CollectiveTrace(2, run.trainer.strategy.model, {}, calls.extend)
        with trace.around(2):
            save(stop)
        watching = False

    sys.addaudithook(hook)
    run._save = watched  # type: ignore[method-assign]
    run.run()
    return [call.collective for call in calls], sorted(opened)


def test_work_of_a_save_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    """Oracle: the other world size, separately for rank 0, which handles the common files, and for
    the other ranks."""
    counts = {}
    for ranks in (2, 4):
        overrides = [
            *SMALL,
            "mesh.fsdp_size=2",
            "train.steps=3",
            "checkpoint.every=1",
            "metrics.console=none",
        ]
        config = configured(
            [*overrides, f"metrics.run_dir={tmp_path / str(ranks)}"], ranks, ranks
        )
        counts[ranks] = run_ranks(ranks, numbers_of_a_save, config)
    first = counts[4][0]
    others = counts[4][1:]
    assert counts[2][0] == first and len(first[0]) > 3 and len(first[1]) > 4
    assert all(Counter(other[0]) == Counter(counts[2][1][0]) for other in others)
    assert all(set(other[1]) <= set(counts[2][1][1]) for other in others)


def test_message_counts_follow_the_ring_algorithms() -> None:
    """Oracle: computed by hand: a gather of 8 takes 7 of each rank, an all-reduce of 4 twice 3."""
    volumes = (
        Volume("all_gather", "shard", 8, 10, 1, 1.0),
        Volume("all_reduce", "replicate", 4, 2, 1, 1.0),
    )
    assert bench_scaling.messages(volumes) == 10 * 7 + 2 * 2 * 3
