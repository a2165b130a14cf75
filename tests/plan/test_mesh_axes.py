"""Traces of runs that share sequences or split experts against formulas, and estimates
against traces."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics.prediction import Category, Prediction, Volume
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import (
    COMPUTE_STREAM,
    Collective,
    Kernel,
    KernelKind,
    Trace,
)
from fsdptoys.plan.simulator.replay import Replay, replay
from tests.harness.traced_runs import configured, live_bytes, of_step, traced, traced_on

BF16 = "parallel.param_dtype=bfloat16"
extended = pytest.mark.extended
LAYERS = 2
DIM = 256
HEADS = 8
WIDTH = 32
TOKENS = 512
VOCAB = 1024
LLAMA = (
    "model=llama_debug", "parallel=fsdp2", BF16, "train.batch_size=1", f"train.seq_len={TOKENS}",
    "model.ffn_dim=512", f"model.n_layers={LAYERS}", f"model.dim={DIM}", f"model.n_heads={HEADS}",
    f"model.vocab_size={VOCAB}",
)  # fmt: skip
CONTEXTS = {
    "ulysses": ("mesh.cp_size=4",),
    "gathered": ("mesh.cp_size=4", "parallel.context=gathered"),
    "ring": ("mesh.cp_size=4", "parallel.context=ring"),
}
EXPERTS = 8
TOP_K = 2
EXPERT_FFN = 64
MOE = (
    "model=qwen3_moe_debug", "parallel=fsdp2", BF16, "train.batch_size=1",
    f"train.seq_len={TOKENS}", f"model.n_layers={LAYERS}", f"model.dim={DIM}",
    f"model.n_experts={EXPERTS}", f"model.top_k={TOP_K}", f"model.expert_ffn_dim={EXPERT_FFN}",
)  # fmt: skip


def both(
    overrides: Sequence[str], name: str = "h100", ranks: int = 8
) -> tuple[Prediction, Replay]:
    """An estimate of a run, and the replay of its full trace."""
    hardware = load_hardware(name)
    config = configured(overrides, ranks, hardware.device_type)
    trace = traced_on(config, hardware, ranks)
    return fast_estimate(config, hardware, ranks), replay(
        trace, hardware, build_allocator(config.plan.allocator)
    )


def exchanged(
    trace: Trace, axis: str, ranks: int, name: str = "all_to_all"
) -> Counter[int]:
    """Bytes of each exchange along an axis in a step → how often."""
    events = [
        event
        for event in of_step(trace, Collective)
        if (event.name, event.axis) == (name, axis)
    ]
    assert {(event.group_size, event.group_stride) for event in events} == {(ranks, 1)}
    return Counter(event.bytes for event in events)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "copied"), [(4, 4, 4), pytest.param(2, 8, 8, marks=extended)]
)
def test_ulysses_exchanges_heads_for_sequence_and_back_in_forward_and_backward(
    kv_heads: int, ranks: int, copied: int
) -> None:
    """Oracle: t tokens of H query heads and of both kinds of the copied key heads, and of H
    results, in 16 bits."""
    trace = traced([*LLAMA, f"model.n_kv_heads={kv_heads}", f"mesh.cp_size={ranks}"])
    token = TOKENS // ranks * WIDTH * 2
    assert exchanged(trace, "cp", ranks) == {
        token * (HEADS + 2 * copied): 2 * LAYERS,
        token * HEADS: 2 * LAYERS,
    }


def test_gathered_attention_gathers_keys_again_and_scatters_gradients_in_float32() -> (
    None
):
    """Oracle: keys and values of full sequences, gathered in forward and backward, and their
    gradients."""
    trace = traced(
        [*LLAMA, "model.n_kv_heads=4", "mesh.cp_size=4", "parallel.context=gathered"]
    )
    pair = 2 * TOKENS * 4 * WIDTH
    assert exchanged(trace, "cp", 4, "all_gather") == {pair * 2: 2 * LAYERS}
    assert exchanged(trace, "cp", 4, "reduce_scatter") == {pair * 4: LAYERS}


def test_ring_attention_passes_blocks_in_forward_and_backward_and_their_gradients_home() -> (
    None
):
    """Oracle: N-1 messages of a rank's keys and values each way, and N of their gradients in
    float32."""
    trace = traced(
        [*LLAMA, "model.n_kv_heads=4", "mesh.cp_size=4", "parallel.context=ring"]
    )
    pair = 2 * TOKENS // 4 * 4 * WIDTH
    assert exchanged(trace, "cp", 4, "send") == {
        pair * 2: 2 * 3 * LAYERS,
        pair * 4: 4 * LAYERS,
    }
    streams = {
        event.stream for event in of_step(trace, Collective) if event.axis == "cp"
    }
    assert len(streams) == 1 and COMPUTE_STREAM not in streams


@pytest.mark.parametrize("form", ["ulysses", "gathered", "ring"])
def test_attention_of_a_rank_is_its_part_of_the_causal_half(form: str) -> None:
    """Oracle: the FLOPs of one rank with full sequences, over the ranks; FlashAttention takes no
    masks."""
    overrides = [*LLAMA, "model.n_kv_heads=4"]
    trace = traced([*overrides, *CONTEXTS[form]])
    whole, part = (
        sum(
            event.flops
            for event in of_step(steps, Kernel)
            if event.kind is KernelKind.attention
        )
        for steps in (traced(overrides), trace)
    )
    # Gathered: rank 0 has the first and the last of eight pieces, whose diagonal blocks count half.
    assert part == pytest.approx(whole / 4)
    assert {
        event.attention.split()[0]
        for event in of_step(trace, Kernel)
        if event.attention
    } == {"flash"}


def test_activations_fall_with_the_ranks_that_share_a_sequence() -> None:
    """Oracle: a quarter of the tokens, and attention's result twice: as computed, and after the
    exchange."""
    overrides = [*LLAMA, "model.n_kv_heads=4"]
    whole, part = (
        live_bytes(traced([*overrides, *more]), 2, "backward")
        for more in ((), ("mesh.cp_size=4",))
    )
    twice = LAYERS * TOKENS // 4 * DIM * 2
    assert part[Category.activations] == pytest.approx(
        whole[Category.activations] / 4 + twice, abs=1024
    )
    assert part[Category.logits] == pytest.approx(whole[Category.logits] / 4, abs=1024)
    assert part[Category.parameters] == whole[Category.parameters]


@pytest.mark.parametrize("imbalance", [pytest.param(1, marks=extended), 2])
def test_experts_exchange_rows_and_weights_of_the_assumed_load(imbalance: int) -> None:
    """Oracle: N·K rows of D numbers to the experts and back, in forward and backward, and a weight
    with each."""
    trace = traced([*MOE, "mesh.ep_size=4", f"plan.expert_imbalance={imbalance}"])
    rows = TOKENS * TOP_K * imbalance
    assert exchanged(trace, "ep", 4) == {
        rows * DIM * 2: 4 * LAYERS,
        rows * 2: 2 * LAYERS,
        EXPERTS * 8: LAYERS,
    }
    grouped = [
        event for event in of_step(trace, Kernel) if event.name == "aten::_grouped_mm"
    ]
    assert {event.kind for event in grouped} == {KernelKind.matmul}
    # Three matmuls of a token with D x F numbers, and twice as many in the backward.
    assert (
        sum(event.flops for event in grouped)
        == 3 * LAYERS * rows * 2 * 3 * DIM * EXPERT_FFN
    )


def test_a_rank_gathers_its_experts_only() -> None:
    """Oracle: half of the experts' parameters, over the two ranks that have the same; the others in
    full."""
    gathered: Counter[str] = Counter()
    for event in of_step(
        traced([*MOE, "mesh.ep_size=4", "plan.expert_imbalance=2"]), Collective
    ):
        gathered[event.axis] += event.bytes * (event.name == "all_gather")
    experts = LAYERS * EXPERTS * 3 * DIM * EXPERT_FFN
    assert gathered["efsdp"] == 2 * experts // 4 * 2  # in forward and backward
    assert gathered["shard"] > 0


SELECTIVE, FULL = (
    f"memory.gradient_checkpointing={mode}" for mode in ("selective", "full")
)


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (LLAMA, ("mesh.cp_size=4", "model.n_kv_heads=2")),
        (MOE, ("mesh.ep_size=4", "plan.expert_imbalance=2", FULL)),
        (LLAMA, ("mesh.tp_size=2", "mesh.fsdp_size=4", FULL, "memory.chunk_loss=true")),
        pytest.param(
            LLAMA,
            ("mesh.cp_size=4", "parallel.context=gathered", SELECTIVE),
            marks=extended,
        ),
        pytest.param(
            LLAMA,
            (
                "mesh.cp_size=8",
                "parallel.context=ring",
                "mesh.fsdp_size=8",
                "parallel=fsdp1",
            ),
            marks=extended,
        ),
        pytest.param(
            MOE,
            ("mesh.ep_size=2", "mesh.fsdp_size=4", "mesh.cp_size=2"),
            marks=extended,
        ),
        pytest.param(LLAMA, ("mesh.tp_size=4", "model.n_kv_heads=4"), marks=extended),
        pytest.param(
            LLAMA,
            ("mesh.tp_size=2", "mesh.cp_size=2", "parallel.wrap=block_attn_mlp"),
            marks=extended,
        ),
    ],
)
def test_closed_form_has_the_memory_and_the_exchanges_of_the_trace(
    overrides: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Oracle: the trace of all layers."""
    closed, result = both([*overrides, *more])
    assert closed.memory.peak_bytes == pytest.approx(
        result.memory().peak_bytes, rel=0.01
    )
    assert closed.time.step_seconds == pytest.approx(
        result.time().step_seconds, rel=0.1
    )

    def moved(volumes: Iterable[Volume]) -> dict[tuple[str, str, int], tuple[int, int]]:
        return {
            (volume.collective, volume.axis, volume.group_size): (
                volume.calls,
                volume.bytes,
            )
            for volume in volumes
            if volume.collective != "all_reduce"  # norms and counts
        }

    assert moved(closed.time.volumes) == moved(result.volumes.values())
    mesh = configured([*overrides, *more], 8, "cuda").mesh
    assert closed.tokens_per_step == 8 // (mesh.cp_size * mesh.tp_size) * TOKENS


def test_split_features_gather_tokens_before_layers_and_scatter_sums_after_them() -> (
    None
):
    """Oracle: tokens of B·T·D in 16 bits, of two layers a block and the head or the embedding, in
    both directions."""
    trace = traced([*LLAMA, "model.n_kv_heads=4", "mesh.tp_size=4"])
    tokens = TOKENS * DIM * 2
    times = 2 * (2 * LAYERS + 1)
    assert exchanged(trace, "tp", 4, "all_gather") == {tokens: times}
    assert exchanged(trace, "tp", 4, "reduce_scatter") == {tokens: times}
    reduced = exchanged(trace, "tp", 4, "all_reduce")
    # Gradients of norms in float32; largest logits; sums, labels' logits and a third number of each
    # token.
    assert reduced[DIM * 4] == 2 * LAYERS + 1
    assert reduced[TOKENS * 4] == reduced[3 * TOKENS * 4] == 1


LEAN = ("memory.gradient_checkpointing=full", "memory.chunk_loss=true")
IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "train.max_grad_norm=null",
    "train.skip_nonfinite=false",
)
TRACED = {
    "fsdp2": ("h100", ("parallel=fsdp2", *LEAN, "memory.optimizer_offload=true")),
    "fsdp1": ("h100", ("parallel=fsdp1",)),
    # A micro-batch's gradients, next to DDP's buckets.
    "ddp": ("h100", ("parallel=ddp", "train.grad_accum=2")),
    "single": (
        "h100",
        (
            "parallel=single",
            "memory.optimizer_offload=true",
            "memory.offload_state_dtype=bfloat16",
        ),
    ),
}
MORE = {
    "npu": ("a2", ("parallel=fsdp2",)),
    "muon": ("h100", ("parallel=fsdp2", "optim=muon")),
    "muon, ddp": (
        "h100",
        ("parallel=ddp", "optim=muon", "parallel.param_dtype=float32"),
    ),
    "bfloat16 states": ("h100", ("parallel=fsdp2", "optim.state_dtype=bfloat16")),
    "int4 states": ("h100", ("parallel=fsdp2", "optim.state_dtype=int4")),
    "optimizer in the backward": ("h100", ("parallel=fsdp2", *LEAN, *IN_BACKWARD)),
    "lora": ("4090", ("parallel=single", "tune=lora", *LEAN)),
    "nf4": ("h100", ("parallel=fsdp2", "tune=lora", "tune.base=nf4")),
}
LLAMA_1B = ("model=llama3_1b", "model.n_layers=4", "train.seq_len=2048")
ROWS = [pytest.param(*row, id=name) for name, row in TRACED.items()]
ROWS += [
    pytest.param(*row, id=name, marks=pytest.mark.extended)
    for name, row in MORE.items()
]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("name", "overrides"), ROWS)
def test_closed_form_agrees_with_the_trace(
    name: str, overrides: tuple[str, ...]
) -> None:
    """Oracle: the real trainer, traced and replayed, within the 10% above which a disagreement is
    reported."""
    formula, replayed = both(
        [*LLAMA_1B, BF16, *overrides], name, 1 if "parallel=single" in overrides else 8
    )
    memory = replayed.memory()
    assert formula.memory.end_bytes == pytest.approx(memory.end_bytes, rel=0.01)
    assert formula.memory.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.1)
    assert formula.memory.reserved_bytes == pytest.approx(
        memory.reserved_bytes, rel=0.1
    )
    assert formula.time.step_seconds == pytest.approx(
        replayed.time().step_seconds, rel=0.1
    )
    for exchange in ("all_to_all", "broadcast"):  # of Muon's matrices
        of_formula, of_trace = (
            [
                (volume.axis, volume.calls, volume.bytes)
                for volume in time.volumes
                if volume.collective == exchange
            ]
            for time in (formula.time, replayed.time())
        )
        assert of_formula == of_trace


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ddp_buckets_match_the_trace(dtype: str) -> None:
    """Oracle: the real reducer's all-reduces; a trace has up to three more, of single numbers."""
    formula, replayed = both(
        [*LLAMA_1B, f"parallel.param_dtype={dtype}", "parallel=ddp"]
    )
    times = formula.time, replayed.time()
    (planned,), (real,) = (
        [volume for volume in time.volumes if volume.axis == "world"] for time in times
    )
    assert 0 <= real.calls - planned.calls <= 3
    assert planned.bytes == pytest.approx(real.bytes, rel=1e-5)
