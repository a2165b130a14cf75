"""Plans of pipelines: waits, messages and memory of their schedules, from traces of all stages replayed together."""

import dataclasses
import functools
import io
import math

import pytest
from rich.console import Console

from fsdptoys.config.pipeline_checks import SCHEDULES_SINCE, ZERO_BUBBLE_SINCE
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.metrics.prediction import Category, Prediction
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.plan.pipeline_traces import layers_of_ranks, microbatch_counts
from fsdptoys.plan.predict import predict
from fsdptoys.plan.simulator import costs
from fsdptoys.plan.simulator.allocator import Allocator, build_allocator
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, Kernel, KernelKind, Mark, Message, Messages, Trace
from fsdptoys.plan.simulator.meetings import replay_together
from fsdptoys.plan.simulator.replay import Replay
from fsdptoys.plan.text_report import print_prediction
from fsdptoys.plan.trace.tracer import trace_all
from tests.plan.simulator.imagined import imagined_hardware
from tests.plan.traced import configured

B, T, D = 1, 64, 64
WORDS = ["model=llama_debug", f"model.dim={D}", "model.n_layers=4", f"train.seq_len={T}", f"train.batch_size={B}"]
WORDS += ["parallel=fsdp2", "data=synthetic"]
SCHEDULES = {"gpipe": (4, 4), "1f1b": (4, 4), "interleaved": (2, 4)}
SCHEDULES |= {"zero_bubble": (2, 4)} if TORCH >= ZERO_BUBBLE_SINCE else {}
"""Schedule → ranks, and micro-batches. Each stage has one layer."""

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(TORCH < SCHEDULES_SINCE, reason="this torch has one schedule"),
]


def config_of(schedule: str, *more: str) -> Config:
    ranks, count = SCHEDULES[schedule]
    words = [f"parallel.schedule={schedule}", f"mesh.pp_size={ranks}", f"train.grad_accum={count}"]
    return configured([*WORDS, *words, *more], ranks, "cuda")


def only_attention_takes_time(**values: float) -> Hardware:
    """Hardware on which all layers take equally long, and all else no time."""
    rates = {field.name: math.inf for field in dataclasses.fields(Hardware) if field.name.endswith("_bandwidth")}
    return imagined_hardware(**rates | {"matmul_efficiency": math.inf} | values)


@functools.cache
def replays() -> dict[str, tuple[Replay, ...]]:
    """All ranks of each schedule."""
    made = only_attention_takes_time()
    jobs = {name: [(config_of(name), rank) for rank in range(SCHEDULES[name][0])] for name in SCHEDULES}
    found = {}
    for ranks in (4, 2):
        names = [name for name in SCHEDULES if SCHEDULES[name][0] == ranks]
        traces = iter(trace_all([job for name in names for job in jobs[name]], made, ranks))
        for name in names:
            allocators = [build_allocator(config_of(name).plan.allocator) for _ in range(ranks)]
            found[name] = replay_together([next(traces) for _ in range(ranks)], made, allocators)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_bubbles_of_equal_stages_have_the_published_share(schedule: str) -> None:
    """Oracle: (p − 1) / (v·m + p − 1) of a step, with v stages on each of p ranks (arXiv:2104.04473, section 2.2)."""
    (p, m), v = SCHEDULES[schedule], 2 if schedule == "interleaved" else 1
    for replay in replays()[schedule]:
        time = replay.time()
        assert time.compute_seconds > 0
        assert time.stage_seconds / time.step_seconds == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_hidden_states_and_their_gradients(schedule: str) -> None:
    """Oracle: B·T·D numbers of four bytes, for each micro-batch, boundary between stages and direction."""
    p, m = SCHEDULES[schedule]
    volumes = [volume for replay in replays()[schedule] for key, volume in replay.volumes.items() if key[1] == "pp"]
    sent = [volume for volume in volumes if volume.collective == "send"]
    assert sum(volume.calls for volume in sent) == 2 * m * (4 - 1)
    assert sum(volume.bytes for volume in sent) == 2 * m * (4 - 1) * B * T * D * 4
    assert {volume.group_size for volume in sent} == {p}


def test_activations_are_those_of_the_micro_batches_under_way() -> None:
    """Oracle: p − r of 1f1b on rank r, all m of gpipe, whose last is partly freed at the peak; ranks of one layer."""
    p, m = SCHEDULES["1f1b"]
    one_by_one, gpipe = (
        [replay.memory().categories[Category.activations] for replay in replays()[name]] for name in ("1f1b", "gpipe")
    )
    of_one = one_by_one[1] - one_by_one[2]
    assert of_one > B * T * D * 4
    assert one_by_one[1:3] == [(p - 1) * of_one, (p - 2) * of_one]
    assert gpipe[1] == gpipe[2]
    assert (m - 1) * of_one < gpipe[1] <= m * of_one


def messages(rank: int, *parts: tuple[int, bool], size: int = 100) -> Messages:
    return Messages(1, tuple(Message(peer, size, sends) for peer, sends in parts), rank, 2, 1, "pp")


def two_allocators() -> list[Allocator]:
    return [build_allocator(AllocatorKind.expandable) for _ in range(2)]


def kernel(seconds: float) -> Kernel:
    return Kernel("k", 1, KernelKind.attention, seconds, 0, "bfloat16")


def test_a_message_waits_for_its_later_rank_and_takes_the_time_of_its_link() -> None:
    """Oracle: arithmetic: arrivals after 2 s and 5 s, 100 bytes at 50 bytes per second."""
    hardware = only_attention_takes_time(intra_node_bandwidth=50.0)
    sender = Trace([Mark(1, "forward"), kernel(2.0)._replace(stream=1), messages(0, (1, True)), Mark(1, "end")])
    receiver = Trace([Mark(1, "forward"), kernel(5.0)._replace(stream=COMPUTE_STREAM)])
    receiver.events += [messages(1, (0, False))._replace(stream=COMPUTE_STREAM), Mark(1, "end")]
    found = replay_together([sender, receiver], hardware, two_allocators())
    assert found[1].time().step_seconds == 5 + 2
    assert found[1].time().exposed_communication_seconds == 2
    late = Trace([Mark(1, "forward"), messages(1, (0, False))._replace(stream=COMPUTE_STREAM), Mark(1, "end")])
    found = replay_together([sender, late], hardware, two_allocators())
    assert found[1].time().stage_seconds == 2
    assert found[1].time().step_seconds == 2 + 2


def test_ranks_that_wait_for_one_another_are_reported() -> None:
    """Oracle: the definition of a deadlock."""
    traces = [Trace([Mark(1, "forward"), messages(rank, (1 - rank, False)), Mark(1, "end")]) for rank in range(2)]
    with pytest.raises(RuntimeError, match="these ranks wait for one another"):
        replay_together(traces, imagined_hardware(), two_allocators())


@pytest.mark.parametrize(
    ("stride", "rank", "peer", "leaves"),
    [(2, 0, 1, False), (2, 1, 2, True), (2, 3, 0, True), (3, 0, 1, True), (8, 0, 1, True), (1, 2, 3, False)],
)
def test_messages_leave_a_node_between_ranks_of_different_nodes(
    stride: int, rank: int, peer: int, leaves: bool
) -> None:
    """Oracle: nodes of four devices, counted by hand; with three ranks in each part one of them has the other node."""
    event = messages(rank, (peer, True))._replace(group_stride=stride)
    assert costs.leaves_node(imagined_hardware(devices_per_node=4), event, event.messages[0]) is leaves


@functools.cache
def extrapolated() -> tuple[Config, Prediction]:
    """Of twelve micro-batches."""
    words = ("model.n_layers=2", "parallel.schedule=1f1b", "train.grad_accum=12", "plan.hardware=h100")
    config = config_of("interleaved", *words)
    return config, predict(config, load_hardware("h100"), 2)


@pytest.mark.extended
def test_extrapolated_micro_batches_agree_with_all_of_them() -> None:
    """Oracle: a trace of all micro-batches."""
    config, found = extrapolated()
    plan = dataclasses.replace(config.plan, exact=True)
    exact = predict(dataclasses.replace(config, plan=plan), load_hardware("h100"), 2)
    assert (found.method, exact.method) == ("traced, all stages, 4 and 6 micro-batches", "traced, all stages")
    assert found.memory.peak_bytes == pytest.approx(exact.memory.peak_bytes, rel=0.01)
    assert found.memory.reserved_bytes == pytest.approx(exact.memory.reserved_bytes, rel=0.03)
    assert found.time.step_seconds == pytest.approx(exact.time.step_seconds, rel=0.03)
    sent = [{volume.axis: volume.bytes for volume in each.time.volumes} for each in (found, exact)]
    assert sent[0]["pp"] == sent[1]["pp"]
    for one, other in zip(found.stages, exact.stages, strict=True):
        assert one.layers == other.layers
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)


def test_parts_of_a_prediction_add_up_and_survive_json() -> None:
    """Oracle: the definitions of the fields."""
    _, prediction = extrapolated()
    time, stages = prediction.time, prediction.stages
    waits = time.exposed_communication_seconds + time.exposed_transfer_seconds + time.host_seconds
    assert time.compute_seconds + waits + time.stage_seconds == pytest.approx(time.step_seconds)
    assert prediction.memory.reserved_bytes == max(stage.reserved_bytes for stage in stages)
    assert time.compute_seconds == max(stage.compute_seconds for stage in stages)
    assert prediction.tokens_per_step == B * T * 12
    assert Prediction.from_dict(prediction.to_dict()) == prediction


def test_a_plan_prints_its_pipeline_ranks() -> None:
    """Oracle: the fields of the prediction."""
    config, prediction = extrapolated()
    console = Console(file=io.StringIO(), width=80)
    print_prediction(config, prediction, load_hardware("h100"), 2**30, [], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("layers over 2", "64 tokens x 12 micro-batches per 2 ranks", "Pipeline ranks", "waiting for"):
        assert words in text, text
    for stage in prediction.stages:
        assert f" {stage.layers} " in text


@pytest.mark.parametrize(
    ("schedule", "count", "counts"),
    [("gpipe", 8, [8]), ("gpipe", 20, [20]), ("gpipe", 21, [8, 12]), ("1f1b", 64, [8, 12]), ("interleaved", 10, [10])],
)
def test_many_micro_batches_are_extrapolated_from_two_numbers(schedule: str, count: int, counts: list[int]) -> None:
    """Oracle: the rule: two traces have fewer micro-batches than the run, and more than fill the pipeline."""
    assert microbatch_counts(config_of(schedule, f"train.grad_accum={count}")) == counts
    everything = config_of(schedule, f"train.grad_accum={count}", "plan.exact=true")
    assert microbatch_counts(everything) == [count]


def test_layers_of_a_rank_are_named() -> None:
    """Oracle: stage s of the model is on rank s mod N."""
    assert layers_of_ranks(config_of("interleaved", "model.n_layers=8", "model.dim=256")) == ["0-1, 4-5", "2-3, 6-7"]
    assert layers_of_ranks(config_of("gpipe")) == ["0", "1", "2", "3"]
