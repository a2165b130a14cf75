"""Closed form of pipelines, and searches over them."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import pipelining

from fsdptoys.cli.plan import plan_command
from fsdptoys.config.compose import compose_config
from fsdptoys.config.pipeline_checks import SCHEDULES_SINCE, ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Category, Prediction
from fsdptoys.models.stages import Stage
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.plan.estimate import estimate
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.predict import Predictor
from fsdptoys.plan.search.effects import effects
from fsdptoys.plan.search.ranking import label
from fsdptoys.plan.search.search import SearchResult, search
from fsdptoys.plan.search.switches import EVERYTHING, Combinations, fixed_keys, validate_switches
from fsdptoys.plan.simulator.pipeline_schedules import Action, duration, most_in_flight, order_of
from tests.plan.traced import configured

ONE_BY_ONE, INTERLEAVED = PipelineSchedule("1f1b"), PipelineSchedule.interleaved
WORDS = ["model=llama3_1b", "model.tie_embeddings=false", "model.n_layers=6", "train.seq_len=2048"]
WORDS += ["train.batch_size=2", "parallel=fsdp2", "data=synthetic", "plan.hardware=h100"]
ONE_FORWARD = ("parallel.schedule=1f1b", "train.grad_accum=5")
REPLICAS = ("mesh.pp_size=4", "mesh.fsdp_size=1", "parallel.param_dtype=bfloat16")
RUNS = {
    "interleaved": (4, "mesh.pp_size=2", "parallel.schedule=interleaved", "train.grad_accum=4"),
    "1f1b": (6, "mesh.pp_size=3", *ONE_FORWARD),
    "gpipe": (3, "mesh.pp_size=3", "train.grad_accum=5", "memory.chunk_loss=true"),
    "tp": (8, "mesh.pp_size=2", "mesh.tp_size=2", "parallel.schedule=1f1b", "train.grad_accum=4"),
    "checkpointing": (8, *REPLICAS, *ONE_FORWARD, "memory.gradient_checkpointing=full"),
}
"""Run → ranks and overrides."""
SHORT = {"interleaved"}
each_run = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.extended) for name in RUNS]
)

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(TORCH < SCHEDULES_SINCE, reason="this torch has one schedule"),
]


@functools.cache
def both(name: str) -> tuple[Config, Prediction, Prediction]:
    """A run in closed form and as all its ranks' traces say."""
    ranks, *more = RUNS[name]
    config, hardware = configured([*WORDS, *more], ranks, "cuda"), load_hardware("h100")
    return config, closed_form(config, hardware, ranks), Predictor(config, hardware, ranks)(hardware)


@each_run
def test_closed_form_of_a_pipeline_agrees_with_the_traces_of_its_ranks(name: str) -> None:
    """Oracle: the trainer's own steps on each rank, replayed together."""
    _, closed, traced = both(name)
    assert closed.tokens_per_step == traced.tokens_per_step
    assert closed.model_flops_per_step == pytest.approx(traced.model_flops_per_step)
    assert closed.memory.peak_bytes == pytest.approx(traced.memory.peak_bytes, rel=0.05)
    assert closed.memory.host_bytes < 2**20 > traced.memory.host_bytes
    assert closed.memory.reserved_bytes == pytest.approx(traced.memory.reserved_bytes, rel=0.08)
    assert closed.time.step_seconds == pytest.approx(traced.time.step_seconds, rel=0.08)
    assert not any("the closed form gives" in doubt for doubt in traced.doubts)
    for mine, theirs in zip(closed.stages, traced.stages, strict=True):
        assert mine.layers == theirs.layers
        assert mine.compute_seconds == pytest.approx(theirs.compute_seconds, rel=0.05)
        assert mine.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.12)


@each_run
def test_parts_of_a_closed_form_add_up(name: str) -> None:
    """Oracle: the definitions of the fields."""
    closed = both(name)[1]
    time, memory = closed.time, closed.memory
    waits = time.exposed_communication_seconds + time.exposed_transfer_seconds + time.host_seconds
    assert time.compute_seconds + waits + time.stage_seconds == pytest.approx(time.step_seconds)
    assert sum(memory.categories.values()) == pytest.approx(memory.peak_bytes, rel=1e-6)
    assert min(memory.categories.values()) >= 0 and memory.categories[Category.activations] > 0
    assert memory.reserved_bytes == max(stage.reserved_bytes for stage in closed.stages)


@pytest.mark.extended
def test_a_prediction_does_not_depend_on_those_before_it() -> None:
    """Oracle: the same again; a pipeline's first stage had as many ranks, and Muon asks for their group."""
    hardware, ranks = load_hardware("h100"), 7  # no other test has as many
    closed_form(configured([*WORDS, "mesh.pp_size=2"], 2 * ranks, "cuda"), hardware, 2 * ranks)
    muon = configured([*WORDS, "optim=muon"], ranks, "cuda")
    found = closed_form(muon, hardware, ranks)
    estimate._skeletons.cache_clear()
    assert closed_form(muon, hardware, ranks) == found


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 6), (4, 4), (4, 8), (3, 9)])
def test_interleaved_order_is_pytorchs(ranks: int, count: int) -> None:
    """Oracle: ``ScheduleInterleaved1F1B.pipeline_order``, without slots in which a rank does nothing."""
    common = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": 0, "group": None, "is_last": False}
    common |= {"has_backward": True, "submod": None, "device": torch.device("cpu")}
    stages = [SimpleNamespace(stage_index=index, is_first=index == 0, **common) for index in (0, ranks)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, count)  # type: ignore[arg-type]
    for rank, actions in schedule.pipeline_order.items():
        theirs = [
            Action(each.computation_type.name == "FORWARD", each.stage_index, each.microbatch_index or 0)
            for each in actions
            if each is not None
        ]
        assert list(order_of(INTERLEAVED, ranks, rank, count)) == theirs


@pytest.mark.parametrize(
    ("schedule", "ranks", "count"),
    [(PipelineSchedule.gpipe, 4, 4), (ONE_BY_ONE, 2, 4), (ONE_BY_ONE, 4, 12), (INTERLEAVED, 2, 2), (INTERLEAVED, 2, 8)],
)
def test_equal_stages_wait_for_the_published_share(schedule: PipelineSchedule, ranks: int, count: int) -> None:
    """Oracle: (p − 1) / (v·m + p − 1) of a step, with v stages on each of p ranks (arXiv:2104.04473, section 2.2).

    With more ranks PyTorch's order of messages makes interleaved slower: those tests compare with traces.
    """
    per_rank = schedule.stages_per_rank
    orders = [list(order_of(schedule, ranks, rank, count)) for rank in range(ranks)]
    seconds = duration(orders, [(1.0, 2.0)] * ranks * per_rank)
    assert seconds == pytest.approx(3.0 * (per_rank * count + ranks - 1))


def test_a_slow_stage_determines_the_time() -> None:
    """Oracle: two stages of 1 and 3 seconds, worked by hand: the slow one begins after a forward of the other."""
    orders = [list(order_of(ONE_BY_ONE, 2, rank, 4)) for rank in range(2)]
    assert duration(orders, [(0.25, 0.75), (1.0, 2.0)]) == pytest.approx(0.25 + 4 * 3.0 + 0.75)


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    """Oracle: all m of gpipe; p − r of 1f1b; 3 p − 1 forwards of half of rank 0's layers, p + 1 of the last's."""
    stages = [Stage(place, place + 1, place == 0, place == 7) for place in range(8)]
    for schedule, expected in (
        (PipelineSchedule.gpipe, [8, 8, 8, 8]),
        (ONE_BY_ONE, [4, 3, 2, 1]),
        (INTERLEAVED, [11, 9, 7, 5]),
    ):
        orders = [list(order_of(schedule, 4, rank, 8)) for rank in range(4)]
        assert [most_in_flight(order, stages) for order in orders] == expected


@functools.cache
def found() -> SearchResult:
    """A search on two nodes that varies the shard axis and stages."""
    fixed = ["mesh.cp_size=1", "mesh.tp_size=1", "parallel.wrap=block", "parallel.reshard_after_forward=default"]
    fixed += ["memory.activation_offload=false", "memory.optimizer_offload=false", "memory.cpu_offload=false"]
    fixed += ["memory.gradient_checkpointing=none", "memory.chunk_loss=true", "train.batch_size=1"]
    words = [*WORDS, *fixed, "parallel.param_dtype=bfloat16"]
    return search(compose_config(words), words, load_hardware("h100"), 16, 64 * 2**30, closed_form)


@pytest.mark.extended
def test_a_search_on_several_nodes_tries_stages_with_both_schedules() -> None:
    """Oracle: the settings of the predicted candidates, which validate, and have eight micro-batches for each stage."""
    configs = [one.config for one in found().candidates if one.config.mesh.pp_size > 1]
    assert {one.parallel.schedule for one in configs} == {ONE_BY_ONE, INTERLEAVED}  # type: ignore[attr-defined]
    assert {one.mesh.pp_size for one in configs} == {2}  # as many as nodes
    names = {label(config) for config in configs}
    assert {"pp2 b1 1f1b", "pp2 b1 interleaved"} <= {" ".join(name.split()[1:4]) for name in names}
    for config in configs:
        assert config.train.grad_accum == 8 * config.mesh.pp_size
        validate_switches(config, 16, "cuda")


@pytest.mark.extended
def test_stages_count_as_one_setting_of_the_best() -> None:
    """Oracle: the number of micro-batches follows from that of stages, so that nothing else differs."""
    result = found()
    settings = {each.setting.partition("=")[0] for each in effects(result.best, result.candidates, result.over)}
    assert "mesh.pp_size" in settings and "train.grad_accum" not in settings


def test_typed_stages_stay() -> None:
    """Oracle: the command line, whose keys no combination has."""
    words = [*WORDS, "mesh.pp_size=2", "train.grad_accum=4", "parallel.schedule=1f1b"]
    combinations = Combinations(compose_config(words), fixed_keys(words), EVERYTHING, 16, 8)
    seed = next(combinations.all())
    for changes in (seed, *combinations.neighbors(seed, 1, faster=True)):
        assert not changes.keys() & {"mesh.pp_size", "train.grad_accum", "parallel.schedule"}


@pytest.mark.skipif(TORCH < ZERO_BUBBLE_SINCE, reason="refused before")
def test_searches_refuse_zero_bubble() -> None:
    """Oracle: the sentence."""
    words = ["search", "model=llama_debug", "train.seq_len=64", "mesh.pp_size=2", "plan.hardware=h100"]
    words += ["parallel.schedule=zero_bubble", "train.grad_accum=4"]
    with pytest.raises(ConfigError, match=r"does not cover parallel\.schedule=zero_bubble; set parallel\.schedule="):
        plan_command(words)
