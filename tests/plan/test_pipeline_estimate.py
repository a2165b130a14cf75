"""Plans of pipelines: waits, messages and memory of their schedules, and estimates.

Traces of all stages are replayed together.
"""

import functools
import io

import pytest
from rich.console import Console

from fsdptoys.config.rules.pipeline import SCHEDULES_SINCE, ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics.prediction import Category, Prediction
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.plan.estimate import estimate
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.estimate.pipeline import layers_of_ranks
from fsdptoys.plan.predict import caveats, predict
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import Replay
from fsdptoys.plan.text_report import print_prediction
from tests.harness.full_trace import predict_in_full, trace_all
from tests.harness.multi_rank_replay import replay_together
from tests.harness.traced_runs import configured, only_attention_takes_time

B = 1
T = 64
D = 64
TINY = [
    "model=llama_debug",
    f"model.dim={D}",
    "model.n_layers=4",
    f"train.seq_len={T}",
    f"train.batch_size={B}",
]
TINY += ["parallel=fsdp2", "data=synthetic"]
SCHEDULES = {"gpipe": (4, 4), "1f1b": (4, 4), "interleaved": (2, 4)}
SCHEDULES |= {"zero_bubble": (2, 4)} if TORCH >= ZERO_BUBBLE_SINCE else {}
"""Schedule → ranks, and micro-batches. Each stage has one layer."""

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(TORCH < SCHEDULES_SINCE, reason="this torch has one schedule"),
]


def config_of(schedule: str, *more: str) -> Config:
    ranks, count = SCHEDULES[schedule]
    overrides = [
        f"parallel.schedule={schedule}",
        f"mesh.pp_size={ranks}",
        f"train.grad_accum={count}",
    ]
    return configured([*TINY, *overrides, *more], ranks, "cuda")


@functools.cache
def replays() -> dict[str, tuple[Replay, ...]]:
    """All ranks of each schedule."""
    hardware = only_attention_takes_time()
    jobs = {
        name: [(config_of(name), rank) for rank in range(SCHEDULES[name][0])]
        for name in SCHEDULES
    }
    replays_of = {}
    for ranks in (4, 2):
        names = [name for name in SCHEDULES if SCHEDULES[name][0] == ranks]
        traces = iter(
            trace_all([job for name in names for job in jobs[name]], hardware, ranks)
        )
        for name in names:
            allocators = [
                build_allocator(config_of(name).plan.allocator) for _ in range(ranks)
            ]
            replays_of[name] = replay_together(
                [next(traces) for _ in range(ranks)], hardware, allocators
            )
    return replays_of


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_bubbles_of_equal_stages_have_the_published_share(schedule: str) -> None:
    """Oracle: (p − 1) / (v·m + p − 1) of a step, with v stages on each of p ranks
    (arXiv:2104.04473, section 2.2)."""
    p, m = SCHEDULES[schedule]
    v = 2 if schedule == "interleaved" else 1
    for replay in replays()[schedule]:
        time = replay.time()
        assert time.compute_seconds > 0
        assert time.stage_seconds / time.step_seconds == pytest.approx(
            (p - 1) / (v * m + p - 1)
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_hidden_states_and_their_gradients(schedule: str) -> None:
    """Oracle: B·T·D numbers of four bytes, for each micro-batch, boundary between stages and
    direction."""
    p, m = SCHEDULES[schedule]
    volumes = [
        volume
        for replay in replays()[schedule]
        for key, volume in replay.volumes.items()
        if key[1] == "pp"
    ]
    sent = [volume for volume in volumes if volume.collective == "send"]
    assert sum(volume.calls for volume in sent) == 2 * m * (4 - 1)
    assert sum(volume.bytes for volume in sent) == 2 * m * (4 - 1) * B * T * D * 4
    assert {volume.group_size for volume in sent} == {p}


def test_activations_are_those_of_the_micro_batches_under_way() -> None:
    """Oracle: p − r of 1f1b on rank r, all m of gpipe, whose last is partly freed at the peak;
    ranks of one layer."""
    p, m = SCHEDULES["1f1b"]
    one_by_one, gpipe = (
        [replay.memory().categories[Category.activations] for replay in replays()[name]]
        for name in ("1f1b", "gpipe")
    )
    of_one = one_by_one[1] - one_by_one[2]
    assert of_one > B * T * D * 4
    assert one_by_one[1:3] == [(p - 1) * of_one, (p - 2) * of_one]
    assert gpipe[1] == gpipe[2]
    assert (m - 1) * of_one < gpipe[1] <= m * of_one


@pytest.mark.extended
def test_extrapolated_micro_batches_agree_with_all_of_them() -> None:
    """Oracle: a trace of all twelve micro-batches."""
    overrides = ("model.n_layers=2", "parallel.schedule=1f1b", "train.grad_accum=12")
    config = config_of("interleaved", *overrides)
    hardware = load_hardware("h100")
    prediction = predict(config, hardware, 2)
    full = predict_in_full(config, hardware, 2)
    assert prediction.memory.peak_bytes == pytest.approx(
        full.memory.peak_bytes, rel=0.05
    )
    assert prediction.memory.reserved_bytes == pytest.approx(
        full.memory.reserved_bytes, rel=0.08
    )
    assert prediction.time.step_seconds == pytest.approx(
        full.time.step_seconds, rel=0.08
    )
    for one, other in zip(prediction.stages, full.stages, strict=True):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.12)


def test_layers_of_a_rank_are_named() -> None:
    """Oracle: stage s of the model is on rank s mod N."""
    assert layers_of_ranks(
        config_of("interleaved", "model.n_layers=8", "model.dim=256")
    ) == [
        "0-1, 4-5",
        "2-3, 6-7",
    ]
    assert layers_of_ranks(config_of("gpipe")) == ["0", "1", "2", "3"]


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
ONE_FORWARD = ("parallel.schedule=1f1b", "train.grad_accum=5")
REPLICAS = ("mesh.pp_size=4", "mesh.fsdp_size=1", "parallel.param_dtype=bfloat16")
RUNS = {
    "interleaved": (
        4,
        "mesh.pp_size=2",
        "parallel.schedule=interleaved",
        "train.grad_accum=4",
    ),
    "1f1b": (6, "mesh.pp_size=3", *ONE_FORWARD),
    "gpipe": (3, "mesh.pp_size=3", "train.grad_accum=5", "memory.chunk_loss=true"),
    "tp": (
        8,
        "mesh.pp_size=2",
        "mesh.tp_size=2",
        "parallel.schedule=1f1b",
        "train.grad_accum=4",
    ),
    "checkpointing": (8, *REPLICAS, *ONE_FORWARD, "memory.gradient_checkpointing=full"),
}
"""Run → ranks and overrides."""
SHORT = {"interleaved"}
each_run = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.extended)
        for name in RUNS
    ],
)


@functools.cache
def both(name: str) -> tuple[Config, Prediction, Prediction]:
    """An estimate of a run, and what full traces of all its ranks say."""
    ranks, *more = RUNS[name]
    config = configured([*WORDS, *more], ranks, "cuda")
    hardware = load_hardware("h100")
    return (
        config,
        fast_estimate(config, hardware, ranks),
        predict_in_full(config, hardware, ranks),
    )


@each_run
def test_estimate_of_a_pipeline_agrees_with_the_traces_of_its_ranks(name: str) -> None:
    """Oracle: the trainer's own steps on each rank, replayed together."""
    _, closed, traced = both(name)
    assert closed.tokens_per_step == traced.tokens_per_step
    assert closed.model_flops_per_step == pytest.approx(traced.model_flops_per_step)
    assert closed.memory.peak_bytes == pytest.approx(traced.memory.peak_bytes, rel=0.05)
    assert closed.memory.host_bytes < 2**20 > traced.memory.host_bytes
    assert closed.memory.reserved_bytes == pytest.approx(
        traced.memory.reserved_bytes, rel=0.08
    )
    assert closed.time.step_seconds == pytest.approx(traced.time.step_seconds, rel=0.08)
    for stage, full_stage in zip(closed.stages, traced.stages, strict=True):
        assert stage.layers == full_stage.layers
        assert stage.compute_seconds == pytest.approx(
            full_stage.compute_seconds, rel=0.05
        )
        assert stage.peak_bytes == pytest.approx(full_stage.peak_bytes, rel=0.12)


@each_run
def test_parts_of_a_prediction_add_up_and_survive_json(name: str) -> None:
    """Oracle: the definitions of the fields."""
    prediction = both(name)[1]
    time = prediction.time
    memory = prediction.memory
    stages = prediction.stages
    waits = (
        time.exposed_communication_seconds
        + time.exposed_transfer_seconds
        + time.host_seconds
    )
    assert time.compute_seconds + waits + time.stage_seconds == pytest.approx(
        time.step_seconds
    )
    assert sum(memory.categories.values()) == pytest.approx(memory.peak_bytes, rel=1e-6)
    assert (
        min(memory.categories.values()) >= 0
        and memory.categories[Category.activations] > 0
    )
    assert memory.reserved_bytes == max(stage.reserved_bytes for stage in stages)
    assert time.compute_seconds == max(stage.compute_seconds for stage in stages)
    tree = prediction.to_dict()
    assert Prediction.from_dict(tree) == prediction
    tree["doubts"] = tree.pop("caveats")  # as earlier versions wrote it
    assert Prediction.from_dict(tree) == prediction


def test_a_plan_prints_its_pipeline_ranks() -> None:
    """Oracle: the fields of the prediction."""
    config, prediction, _ = both("interleaved")
    console = Console(file=io.StringIO(), width=80)
    print_prediction(config, prediction, load_hardware("h100"), 2**30, [], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for phrase in (
        "layers over 2",
        "2,048 tokens x 4 micro-batches per 2 ranks",
        "Pipeline ranks",
        "waiting for",
    ):
        assert phrase in text, text
    for stage in prediction.stages:
        assert f" {stage.layers} " in text


@pytest.mark.extended
def test_a_prediction_does_not_depend_on_those_before_it() -> None:
    """Oracle: the same again; a pipeline's first stage had as many ranks, and Muon asks for their
    group."""
    hardware = load_hardware("h100")
    ranks = 7  # no other test has as many
    fast_estimate(
        configured([*WORDS, "mesh.pp_size=2"], 2 * ranks, "cuda"), hardware, 2 * ranks
    )
    muon = configured([*WORDS, "optim=muon"], ranks, "cuda")
    estimate_after_others = fast_estimate(muon, hardware, ranks)
    estimate.TRACED.clear()
    assert fast_estimate(muon, hardware, ranks) == estimate_after_others


@pytest.mark.extended
@pytest.mark.skipif(TORCH < ZERO_BUBBLE_SINCE, reason="refused before")
def test_zero_bubble_is_predicted_within_the_stated_bounds() -> None:
    """Oracle: the traces of its ranks; the caveat says that time is an upper bound and memory a
    lower one."""
    overrides = [
        *WORDS,
        "mesh.pp_size=2",
        "parallel.schedule=zero_bubble",
        "train.grad_accum=4",
    ]
    config = configured(overrides, 4, "cuda")
    hardware = load_hardware("h100")
    prediction = predict(config, hardware, 4)
    full = predict_in_full(config, hardware, 4)
    assert (
        full.memory.peak_bytes * 0.7
        < prediction.memory.peak_bytes
        < full.memory.peak_bytes * 1.05
    )
    assert (
        full.time.step_seconds * 0.95
        < prediction.time.step_seconds
        < full.time.step_seconds * 1.3
    )
    assert (
        sum(
            "zero_bubble is predicted as interleaved" in doubt
            for doubt in caveats(config, hardware, 4)
        )
        == 1
    )
