"""Traces of small models on an imagined device, compared with formulas, and through the child
process."""

from collections import Counter

import pytest

from fsdptoys.metrics.prediction import Category
from fsdptoys.optim.vector_adamw import VECTOR_ELEMENTS
from fsdptoys.plan.simulator.events import (
    Alloc,
    Collective,
    Free,
    HostWaitWorkers,
    HostWork,
    Kernel,
    KernelKind,
    Mark,
    RecordEvent,
    RecordStream,
    Trace,
    Transfer,
    WaitEvent,
)
from fsdptoys.plan.trace.fake_device import registers_devices
from fsdptoys.plan.trace.op_costs import fuses_rms_norm
from tests.harness.traced_runs import live_bytes, of_step, traced

BF16 = "parallel.param_dtype=bfloat16"
DIM = 256
LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
FFN = 512
VOCAB = 1024
TOKENS = 512
LLAMA = (
    "model=llama_debug", f"model.dim={DIM}", f"model.n_layers={LAYERS}", f"model.n_heads={HEADS}",
    f"model.n_kv_heads={KV_HEADS}", f"model.ffn_dim={FFN}", f"model.vocab_size={VOCAB}",
    f"train.seq_len={TOKENS}",
)  # fmt: skip
ADAMW_BYTES = {Category.parameters: 4, Category.optimizer_states: 8}
extended = pytest.mark.extended
TRACES_DDP = pytest.mark.skipif(
    not registers_devices(), reason="this torch cannot trace DDP"
)
BLOCK = 2 * DIM * DIM + 2 * DIM * KV_HEADS * HEAD_DIM + 3 * DIM * FFN + 2 * DIM
PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * DIM + DIM


def traced_fsdp2(*overrides: str, device_type: str = "cuda") -> Trace:
    return traced([*LLAMA, "parallel=fsdp2", *overrides], device_type=device_type)


@pytest.mark.parametrize(
    ("overrides", "shards", "bytes_each"),
    [
        (("parallel=fsdp2",), 8, ADAMW_BYTES),
        pytest.param(("parallel=fsdp2", "mesh.fsdp_size=2"), 2, ADAMW_BYTES, marks=extended),
        pytest.param(
            ("parallel=fsdp1", "parallel.use_orig_params=false", "optim.weight_decay_on=all"),
            8, ADAMW_BYTES, marks=extended,
        ),
        (("parallel=fsdp1",), 8, ADAMW_BYTES),
        pytest.param(
            ("parallel=ddp", "optim=sgd"), 1,
            {Category.parameters: 4, Category.gradients: 4, Category.optimizer_states: 4,
             Category.gathered_parameters: 2},
            marks=TRACES_DDP,
        ),
        (("parallel=fsdp2", "memory.optimizer_offload=true"), 8, {Category.parameters: 4}),
        (("parallel=fsdp2", "memory.cpu_offload=true"), 8, {}),
        pytest.param(("parallel=fsdp1", "memory.cpu_offload=true"), 8, {}, marks=extended),
    ],
)  # fmt: skip
def test_memory_at_the_end_of_a_step_is_the_sharded_state(
    overrides: tuple[str, ...], shards: int, bytes_each: dict[Category, int]
) -> None:
    """Oracle: parameters divided by the ranks that share them, times the bytes of each thing that
    stays (ZeRO)."""
    trace = traced([*LLAMA, BF16, *overrides])
    live = live_bytes(trace, 2, "end")
    for category in (
        Category.parameters,
        Category.gradients,
        Category.optimizer_states,
    ):
        expected = PARAMETERS // shards * bytes_each.get(category, 0)
        assert live[category] == pytest.approx(expected, abs=1024), category
    assert live[Category.activations] == live[Category.logits] == 0
    # The rest: the table of rotations, and the step's own few numbers.
    assert (
        sum(live.values())
        - sum(PARAMETERS // shards * size for size in bytes_each.values())
        < 16384
    )
    offloaded = 12 - sum(bytes_each.values()) if "offload" in " ".join(overrides) else 0
    assert trace.host_bytes == pytest.approx(
        PARAMETERS // shards * offloaded, rel=0.6, abs=20_000
    )


@pytest.mark.parametrize(
    ("strategy", "param_bytes"),
    [("fsdp1", 2), ("fsdp2", 2), pytest.param("fsdp2", 4, marks=extended)],
)
def test_collective_volumes_match_zero_3(strategy: str, param_bytes: int) -> None:
    """Oracle: blocks and embedding are gathered twice except FSDP2's embedding, the head once; all
    reduced once."""
    overrides = [BF16] if param_bytes == 2 else []
    moved: Counter[tuple[str, str]] = Counter()
    trace = traced([*LLAMA, f"parallel={strategy}", *overrides])
    for event in of_step(trace, Collective):
        moved[event.name, event.axis] += event.bytes
        assert event.group_size == 8 and event.group_stride == 1
    embedding = VOCAB * DIM
    gathered = 2 * LAYERS * BLOCK + embedding + embedding + DIM
    if strategy == "fsdp1":
        # The norm, alone in the root, stays; the embedding is gathered again
        gathered += DIM + embedding - DIM
    assert moved["all_gather", "shard"] == pytest.approx(
        gathered * param_bytes, rel=0.001
    )
    assert moved["reduce_scatter", "shard"] == pytest.approx(PARAMETERS * 4, rel=0.001)


def test_replicas_all_reduce_each_shard() -> None:
    """Oracle: with two shards on eight ranks, four replicas two ranks apart reduce half of the
    gradients."""
    trace = traced_fsdp2("mesh.fsdp_size=2")
    reduced = [
        event for event in of_step(trace, Collective) if event.axis == "replicate"
    ]
    assert {
        (event.name, event.group_size, event.group_stride) for event in reduced
    } == {("all_reduce", 4, 2)}
    assert sum(event.bytes for event in reduced) == pytest.approx(
        PARAMETERS / 2 * 4, rel=0.001
    )


def test_chunked_loss_matmuls_have_the_dtype_of_their_operands() -> None:
    """Oracle: bf16 operands, also where the weight's gradient is accumulated in float32."""
    trace = traced_fsdp2(BF16, "memory.chunk_loss=true", "memory.chunk_tokens=32")
    products = [
        event for event in of_step(trace, Kernel) if event.kind is KernelKind.matmul
    ]
    assert len(products) > 20 and {event.dtype for event in products} == {"bfloat16"}


@pytest.mark.skipif(registers_devices(), reason="this torch can trace DDP")
def test_ddp_is_refused_where_no_device_can_be_registered() -> None:
    """Oracle: the message; estimates trace the toy there, which has the same buckets."""
    with pytest.raises(RuntimeError, match="cannot trace PyTorch's DDP"):
        traced([*LLAMA, "parallel=ddp"])


@TRACES_DDP
def test_ddp_all_reduces_concurrently_with_the_backward() -> None:
    """Oracle: every gradient is all-reduced once, off the computing stream, which waits for it
    before the update."""
    trace = traced([*LLAMA, "parallel=ddp"])
    reduced = [event for event in of_step(trace, Collective) if event.stream != 0]
    assert sum(event.bytes for event in reduced) == PARAMETERS * 4
    assert {trace.streams[event.stream] for event in reduced} == {"communication"}
    # The model fits one bucket of 25 MiB; of several 1 MiB buckets the first is reduced during the
    # backward.
    small = traced([*LLAMA, "parallel=ddp", "parallel.bucket_cap_mb=1"])
    buckets = [
        index
        for index, event in enumerate(small.events)
        if isinstance(event, Collective) and event.stream != 0
    ]
    in_step = [
        index for index in buckets if index > small.events.index(Mark(2, "backward"))
    ]
    rest = small.events[in_step[0] : small.events.index(Mark(2, "optimizer"))]
    assert len(in_step) > 2 and any(
        isinstance(e, Kernel) and e.kind is KernelKind.matmul for e in rest
    )
    last = max(index for index, event in enumerate(trace.events) if event in reduced)
    before_update = trace.events[last : trace.events.index(Mark(2, "optimizer"))]
    finished_events = {
        event.event
        for event in before_update
        if isinstance(event, RecordEvent) and event.stream != 0
    }
    assert any(
        isinstance(event, WaitEvent)
        and event.stream == 0
        and event.event in finished_events
        for event in before_update
    )


@pytest.mark.parametrize(
    ("device_type", "overrides", "operator", "row_bytes"),
    [
        (
            "cuda",
            (BF16,),
            "aten::_scaled_dot_product_flash_attention",
            HEAD_DIM * 2 + 4,
        ),
        ("npu", (BF16,), "planned::npu_fusion_attention", HEAD_DIM * 2 + 2 * 8 * 4),
        (
            "cuda",
            ("model.n_kv_heads=4",),
            "aten::_scaled_dot_product_efficient_attention",
            HEAD_DIM * 4 + 4,
        ),
    ],
)
def test_attention_saves_its_output_and_statistics(
    device_type: str, overrides: tuple[str, ...], operator: str, row_bytes: int
) -> None:
    """Oracle: a head's row of the result, and the float32 statistics that each library documents;
    2·B·H·T²·K FLOPs."""
    trace = traced_fsdp2(*overrides, device_type=device_type)
    at = next(
        i
        for i, e in enumerate(trace.events)
        if isinstance(e, Kernel) and e.name == operator
    )
    kernel = trace.events[at]
    assert isinstance(kernel, Kernel) and kernel.kind is KernelKind.attention
    assert kernel.flops == 2 * HEADS * TOKENS**2 * HEAD_DIM
    results: list[Alloc] = []
    for event in reversed(trace.events[:at]):
        if not isinstance(event, Alloc):
            break
        results.append(event)
    activations = [
        event
        for event in results
        if trace.categories.get(event.block, event.category) is Category.activations
    ]
    assert sum(event.bytes for event in activations) == pytest.approx(
        HEADS * TOKENS * row_bytes, abs=64
    )


@pytest.mark.parametrize(
    ("device_type", "kernels", "calls"),
    [
        (
            "npu",
            (),
            {"npu_fusion_attention": 1, "rms_norm": 2, "rotary": 4, "npu_swiglu": 1},
        ),
        ("npu", ("torch",), {"npu_fusion_attention": 1}),
        (
            "npu",
            ("torch", "attention=npu", "swiglu=compiled"),
            {"npu_fusion_attention": 1, "swiglu": 1},
        ),
        (
            "cuda",
            ("torch", "rotary=compiled", "swiglu=compiled"),
            {"rms_norm": 2, "rotary": 4, "swiglu": 1},
        ),
    ],
)
def test_chosen_kernels_are_traced(
    device_type: str, kernels: tuple[str, ...], calls: dict[str, int]
) -> None:
    """Oracle: calls a layer by hand, forward and backward of queries and keys' rotations; PyTorch's
    are many others."""
    if device_type == "cuda" and not fuses_rms_norm():
        calls = {name: count for name, count in calls.items() if name != "rms_norm"}
    plain = ("attention", "rms_norm", "rotary", "swiglu") if "torch" in kernels else ()
    chosen = dict.fromkeys(plain, "torch") | dict(
        kernel.split("=") for kernel in kernels if "=" in kernel
    )
    overrides = [
        f"kernels.{operation}={kernel}" for operation, kernel in chosen.items()
    ]
    trace = traced_fsdp2(BF16, *overrides, device_type=device_type)
    counts = Counter(event.name for event in of_step(trace, Kernel))
    calls_by_operator = {
        name.removeprefix("planned::"): count
        for name, count in counts.items()
        if name.startswith("planned::") and not name.endswith("_backward")
    }
    expected = {
        name: count * LAYERS + (name == "rms_norm") for name, count in calls.items()
    }
    assert calls_by_operator == expected


def test_npu_layers_share_one_attention_mask() -> None:
    """Oracle: 2048 x 2048 booleans once, besides the rotary frequencies; PyTorch's function needs
    one per layer."""
    for overrides, masks in (((), 1), (("kernels.attention=torch",), 0)):
        trace = traced_fsdp2(BF16, *overrides, device_type="npu")
        assert live_bytes(trace, 2, "end")[Category.buffers] // 2048**2 == masks
        activations = live_bytes(trace, 2, "backward")[Category.activations]
        assert (activations > LAYERS * 2048**2) == (masks == 0)


def test_flops_of_a_traced_step_match_the_model() -> None:
    """Oracle: 6 FLOPs per weight and token, attention over half the square with its forward's
    matmul once more."""
    trace = traced_fsdp2(BF16)
    matmuls, attention = (
        sum(event.flops for event in of_step(trace, Kernel) if event.kind is kind)
        for kind in (KernelKind.matmul, KernelKind.attention)
    )
    weights = PARAMETERS - VOCAB * DIM - (2 * LAYERS + 1) * DIM
    assert matmuls == 6 * weights * TOKENS
    forward = 12 * HEADS * HEAD_DIM * TOKENS / 2 * TOKENS * LAYERS
    assert attention == forward * 3.5 / 3


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=qwen3_moe_debug", "parallel=fsdp1", "model.router_aux_loss_coef=0.1"),
        ("model=llama4_debug", BF16, "memory.gradient_checkpointing=selective"),
        ("model=gpt2_debug", BF16, "memory.chunk_loss=true"),
        ("model=qwen3_debug", "parallel=fsdp1", "memory.cpu_offload=true", BF16,
         "train.grad_accum=2"),
        ("model=llama_debug", "train.deterministic=true", "optim=sgd", "train.max_grad_norm=null"),
        *(pytest.param(overrides, marks=extended) for overrides in (
            ("model=qwen3_moe_debug", BF16),
            ("model=llama_debug", "memory.cpu_offload=true",
             "memory.cpu_offload_executor=overlapped", BF16),
            ("model=llama_debug", "memory.optimizer_offload=true",
             "memory.offload_state_dtype=bfloat16"),
            ("model=llama_debug", "parallel=ddp", BF16, "parallel.reduce_dtype=bfloat16"),
            ("model=gpt2_debug", "train.deterministic=layout", BF16),
            ("model=qwen3_moe_debug", "train.deterministic=layout", BF16),
        )),
    ],
)  # fmt: skip
def test_traces_of_families_and_switches_complete_and_repeat(
    overrides: tuple[str, ...],
) -> None:
    """Oracle: the trace itself: blocks are freed once, and as much is left after the second step as
    after the first."""
    strategy = (
        ()
        if any(override.startswith("parallel=") for override in overrides)
        else ("parallel=fsdp2",)
    )
    trace = traced([*overrides, *strategy])
    assert trace.events[-1] == Mark(2, "end")
    begun = {event.block for event in trace.events if isinstance(event, Alloc)}
    ended = [event.block for event in trace.events if isinstance(event, Free)]
    assert len(begun) == sum(isinstance(event, Alloc) for event in trace.events)
    assert len(ended) == len(set(ended)) and set(ended) <= begun
    after = [sum(live_bytes(trace, step, "end").values()) for step in (1, 2)]
    assert after[0] == after[1]
    assert 0 in trace.streams and {
        e.stream for e in trace.events if isinstance(e, Alloc)
    } <= set(trace.streams)


def test_streamed_states_are_copied_both_ways_asynchronously() -> None:
    """Oracle: AdamW's two float32 states of this rank's shard go up and down once a step, over
    pinned memory."""
    offload = ["memory.optimizer_offload=true", "memory.offload_schedule=pipelined"]
    trace = traced_fsdp2(*offload)
    streams = {purpose: number for number, purpose in trace.streams.items()}
    for purpose, to_device in (("load", True), ("store", False)):
        copies = [
            event
            for event in of_step(trace, Transfer)
            if event.stream == streams[purpose]
        ]
        assert sum(event.bytes for event in copies) == pytest.approx(
            PARAMETERS // 8 * 8, rel=0.01
        )
        assert all(
            event.to_device is to_device and not event.blocking for event in copies
        )
    recorded = {
        event.block for event in trace.events if isinstance(event, RecordStream)
    }
    assert {trace.categories[block] for block in recorded} == {
        Category.optimizer_states
    }


def test_worker_threads_update_every_offloaded_parameter_once() -> None:
    """Oracle: fused AdamW updates this rank's parameters in a step, and pads the shards of norms to
    full vectors."""
    offload = ["memory.cpu_offload=true", "memory.cpu_offload_executor=overlapped"]
    trace = traced_fsdp2(*offload, BF16)
    updates = [event for event in of_step(trace, HostWork) if event.elements]
    padding = (2 * LAYERS + 1) * (VECTOR_ELEMENTS - DIM // 8)
    assert sum(event.elements for event in updates) == PARAMETERS // 8 + padding
    assert all(event.worker for event in updates)
    works = sum(event.worker for event in trace.events if isinstance(event, HostWork))
    waits = [
        event.works for event in trace.events if isinstance(event, HostWaitWorkers)
    ]
    assert waits == sorted(waits) and 0 < waits[-1] <= works
