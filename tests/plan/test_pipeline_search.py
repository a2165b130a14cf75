"""Searches that vary the stages of a pipeline."""

import functools

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.rules.pipeline import SCHEDULES_SINCE
from fsdptoys.device.profile import load_hardware
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.combinations import EVERYTHING, Combinations
from fsdptoys.plan.search.effects import effects
from fsdptoys.plan.search.ranking import label
from fsdptoys.plan.search.search import SearchResult, search
from fsdptoys.plan.search.switches import (
    count_parameters,
    fixed_keys,
    validate_switches,
)

ONE_BY_ONE = PipelineSchedule("1f1b")
INTERLEAVED = PipelineSchedule.interleaved
WORDS = [
    "model=llama3_1b",
    "model.tie_embeddings=false",
    "model.n_layers=6",
    "train.seq_len=2048",
]
WORDS += [
    "train.batch_size=2",
    "parallel=fsdp2",
    "data=synthetic",
    "plan.hardware=h100",
]

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(TORCH < SCHEDULES_SINCE, reason="this torch has one schedule"),
]


@functools.cache
def search_result() -> SearchResult:
    """A search on two nodes that varies the shard axis and stages."""
    fixed = [
        "mesh.cp_size=1",
        "mesh.tp_size=1",
        "parallel.wrap=block",
        "parallel.reshard_after_forward=default",
    ]
    fixed += [
        "memory.activation_offload=false",
        "memory.optimizer_offload=false",
        "memory.cpu_offload=false",
    ]
    fixed += [
        "memory.gradient_checkpointing=none",
        "memory.chunk_loss=true",
        "train.batch_size=1",
    ]
    overrides = [*WORDS, *fixed, "parallel.param_dtype=bfloat16"]
    return search(
        compose_config(overrides),
        overrides,
        load_hardware("h100"),
        16,
        64 * 2**30,
        fast_estimate,
    )


@pytest.mark.extended
def test_a_search_on_several_nodes_tries_stages_with_both_schedules() -> None:
    """Oracle: the settings of the predicted candidates, which validate, and have eight
    micro-batches for each stage."""
    configs = [
        one.config for one in search_result().candidates if one.config.mesh.pp_size > 1
    ]
    assert {one.parallel.schedule for one in configs} == {ONE_BY_ONE, INTERLEAVED}  # type: ignore[attr-defined]
    assert {one.mesh.pp_size for one in configs} == {2}  # as many as nodes
    names = {label(config) for config in configs}
    assert {"pp2 b1 1f1b", "pp2 b1 interleaved"} <= {
        " ".join(name.split()[1:4]) for name in names
    }
    for config in configs:
        assert config.train.grad_accum == 8 * config.mesh.pp_size
        validate_switches(config, 16, "cuda")


@pytest.mark.extended
def test_stages_count_as_one_setting_of_the_best() -> None:
    """Oracle: the number of micro-batches follows from that of stages, so that nothing else
    differs."""
    result = search_result()
    settings = {
        effect.setting.partition("=")[0]
        for effect in effects(result.best, result.candidates, result.over)
    }
    assert "mesh.pp_size" in settings and "train.grad_accum" not in settings


def test_typed_stages_stay() -> None:
    """Oracle: the command line; no combination has its keys."""
    overrides = [
        *WORDS,
        "mesh.pp_size=2",
        "train.grad_accum=4",
        "parallel.schedule=1f1b",
    ]
    combinations = Combinations(
        compose_config(overrides), fixed_keys(overrides), EVERYTHING, 16, 8
    )
    seed = next(combinations.all())
    for changes in (seed, *combinations.neighbors(seed, 1, faster=True)):
        assert not changes.keys() & {
            "mesh.pp_size",
            "train.grad_accum",
            "parallel.schedule",
        }


@pytest.mark.parametrize(("tp", "stages"), [(1, {4, 8}), (2, {2, 4})])
def test_first_stages_are_the_fewest_with_which_gathered_parameters_and_gradients_fit(
    tp: int, stages: set[int]
) -> None:
    """Oracle: three devices hold them, so two stages do not suffice; with features in two parts,
    two do."""
    base = compose_config(
        ["model=llama3_1b", "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    )
    gathered = count_parameters(base.model) * (2 + 4)
    combinations = Combinations(
        base, {"parallel"}, EVERYTHING, 64, 8, memory_bytes=gathered / 3
    )
    neighbors = combinations.neighbors(
        {"mesh.tp_size": tp} if tp > 1 else {}, 1, faster=True
    )
    assert {
        changes["mesh.pp_size"] for changes in neighbors if "mesh.pp_size" in changes
    } == stages
