"""Kernels of a plan: attention's backend and rate, bytes that no schema shows, and the stream of
FSDP1's joins."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import AttentionKind, load_hardware
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.simulator.events import (
    Alloc,
    Kernel,
    KernelKind,
    Mark,
    RecordStream,
    Trace,
)
from fsdptoys.plan.trace.fake_kernels import replace_kernels
from fsdptoys.plan.trace.op_costs import PREFERS_CUDNN, attention_of
from fsdptoys.plan.trace.op_recorder import OpRecorder
from scripts.planner.validate_plan import trace_row
from tests.harness.plan_processes import in_fresh_process
from tests.harness.traced_runs import configured, imagined_hardware, newer_torch, traced

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FLASH = [SDPBackend.FLASH_ATTENTION]
CUDNN = [SDPBackend.CUDNN_ATTENTION]
BF16 = torch.bfloat16
FP32 = torch.float32


class Names(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "dtype", "causal", "backends", "expected"),
    [
        ("cudnn", BF16, True, (), "cudnn"),
        ("cudnn", BF16, True, FLASH, "flash"),
        ("cudnn", BF16, False, (), "flash"),
        ("cudnn", FP32, True, (), "efficient"),
        ("flash", BF16, True, (), "flash"),
        ("flash", BF16, True, CUDNN, "cudnn"),
    ],
)
def test_plans_take_the_backend_that_pytorch_would(
    kind: str,
    dtype: torch.dtype,
    causal: bool,
    backends: Sequence[SDPBackend],
    expected: str,
) -> None:
    """Oracle: the order of ``cuda/sdp_utils.cpp`` among the enabled backends; cuDNN takes causal 16
    bits alone."""
    query, key, value = (
        torch.empty(1, 4, 64, 32, dtype=dtype, device="meta", requires_grad=True)
        for _ in range(3)
    )
    with (
        replace_kernels(AttentionKind(kind)),
        Names() as recorder,
        sdpa_kernel(backends) if backends else nullcontext(),
    ):
        F.scaled_dot_product_attention(
            query, key, value, is_causal=causal
        ).sum().backward()
    fused = [name for name in recorder.names if "_scaled_dot_product_" in name]
    assert fused == [
        f"aten::_scaled_dot_product_{expected}_attention{suffix}"
        for suffix in ("", "_backward")
    ]


@pytest.mark.parametrize(
    ("hardware", "overrides", "expected"),
    [
        ("h200", (), "cudnn" if TORCH >= PREFERS_CUDNN else "flash"),
        ("h200", ("train.deterministic=true",), "flash"),
        ("a100", (), "flash"),
    ],
)
def test_deterministic_runs_take_flash_attention(
    hardware: str, overrides: Sequence[str], expected: str
) -> None:
    """Oracle: ``check_cudnn_deterministic`` and ``check_prefer_cudnn_attention`` of
    ``cuda/sdp_utils.cpp``."""
    assert (
        attention_of(
            compose_config(["experiment=null", *overrides]), load_hardware(hardware)
        ).value
        == expected
    )


PRODUCTS = re.compile(
    r"::\w*(mm|mv|matmul|addbmm|dot|linear|convolution|attention)(_backward|_activation)?\w*$"
)
TRACED_STEPS = {
    "model=llama_debug memory.chunk_loss=true": 1,
    "model=qwen3_moe_debug optim=muon parallel.param_dtype=bfloat16": 2,
    (
        "model=gpt2_debug parallel=fsdp1 optim=sgd memory.chunk_loss=true "
        "parallel.param_dtype=bfloat16"
    ): 2,
    "model=llama4_debug parallel=ddp memory=checkpointing optim.state_dtype=int8": 2,
    "model=qwen3_debug parallel=fsdp2 mesh.tp_size=2 memory.chunk_loss=true": 4,
    "model=qwen2_debug parallel=fsdp2 mesh.tp_size=2": 2,
    (
        "model=mistral_debug parallel=fsdp1 model.rope_scaling.kind=yarn "
        "model.rope_scaling.factor=2"
    ): 2,
    (
        "model=llama_debug parallel=fsdp2 mesh.pp_size=2 train.grad_accum=2 "
        "memory.gradient_checkpointing=selective"
    ): 2,
    "model=llama_debug mesh.cp_size=2 parallel.context=ring memory.optimizer_offload=false": 2,
    "model=llama_debug mesh.cp_size=2 parallel.context=gathered memory.chunk_loss=true": 2,
    "model=qwen3_moe_debug mesh.ep_size=2 kernels.grouped_matmul=looped": 2,
    (
        "model=llama_debug model.ffn_dim=192 parallel=single tune=lora tune.base=nf4 "
        "parallel.param_dtype=bfloat16"
    ): 1,
    "model=llama_debug parallel=single train.float8=tensorwise parallel.param_dtype=bfloat16": 1,
    "model=gpt2_debug parallel=fsdp2 memory=cpu_offload train.deterministic=true": 2,
}
"""Settings → ranks: each family, optimizer, layout and form of a product at least once."""


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            overrides, id=overrides, marks=pytest.mark.extended if number else ()
        )
        for number, overrides in enumerate(TRACED_STEPS)
    ],
)
def test_every_matrix_product_of_a_step_has_flops(overrides: str) -> None:
    """Oracle: the names of the operators; PyTorch's counter knows none of those that write into an
    argument."""
    trace = traced(
        [*overrides.split(), "train.batch_size=1", "train.seq_len=128"],
        TRACED_STEPS[overrides],
    )
    kernels = [
        kernel
        for event in trace.events
        for kernel in getattr(event, "kernels", (event,))
    ]
    products = [
        kernel
        for kernel in kernels
        if isinstance(kernel, Kernel) and PRODUCTS.search(kernel.name)
    ]
    assert products
    assert {kernel.name for kernel in products if not kernel.flops} == set()


@pytest.mark.skipif(TORCH < PREFERS_CUDNN, reason="this torch prefers FlashAttention")
def test_closed_form_prices_attention_by_backend_and_head_width() -> None:
    """Oracle: the FLOPs of causal attention, 7 B·H·T²·K a layer in both passes, at cuDNN's rate for
    narrow heads."""
    overrides = [
        "model=llama_debug",
        "parallel=single",
        "parallel.param_dtype=bfloat16",
        "train.seq_len=512",
    ]
    config = configured(overrides, 1, "cuda")
    hardware = load_hardware("h200")
    model = config.model
    flops = (
        7
        * model.n_heads
        * 512**2
        * (model.dim // model.n_heads)
        * model.n_layers
        * config.train.batch_size
    )
    slow = imagined_hardware(memory_bandwidth=1e30)
    slow.attention_backends["cudnn 64"] = hardware.attention_backends["cudnn 64"]
    object.__setattr__(slow, "attention", AttentionKind.cudnn)
    seconds = fast_estimate(config, slow, 1).time.kinds[KernelKind.attention.value]
    assert seconds == pytest.approx(
        flops / hardware.attention_backends["cudnn 64"].value, rel=1e-6
    )


@pytest.mark.parametrize(
    ("operate", "read_and_written"),
    [
        (
            lambda part: torch.linalg.vector_norm(part, dtype=torch.float32),
            4 * 1000 + 4,
        ),
        # ``native/ReduceOpsUtils.h``: a norm in float64 writes a copy of its input, and reads it.
        (
            lambda part: torch.linalg.vector_norm(part, dtype=torch.float64),
            (4 + 8 + 8) * 1000 + 8,
        ),
        (lambda part: torch.cat([part] * 20), 2 * 20 * 4 * 1000),
    ],
    ids=["norm", "norm in float64", "a tensor joined several times"],
)
def test_bytes_that_no_schema_shows_are_counted(
    operate: Callable[[Tensor], Tensor], read_and_written: int
) -> None:
    """Oracle: by hand, for 1000 numbers in float32."""
    recorder = OpRecorder("meta", AttentionKind.flash)
    with recorder.watch():
        operate(torch.empty(1000, device="meta"))
    (kernel,) = [event for event in recorder.trace.events if isinstance(event, Kernel)]
    assert kernel.bytes == read_and_written


BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
REST = 2 * 32000 * 4096 + 4096


def of_phase(trace: Trace, phase: str) -> list[object]:
    """Events of a phase of the second step."""
    begins = trace.events.index(Mark(2, phase))
    ends = next(
        i
        for i in range(begins + 1, len(trace.events))
        if isinstance(trace.events[i], Mark)
    )
    return list(trace.events[begins + 1 : ends])


@pytest.mark.usefixtures("unmeasured")
@newer_torch
@pytest.mark.parametrize(
    "strategy", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.extended)]
)
def test_fsdp1_concatenates_gradients_on_the_all_gather_stream(strategy: str) -> None:
    """Oracle: ``Node::stream``: FSDP1's views are made on the gathering stream, FSDP2 makes
    none."""
    trace = in_fresh_process(trace_row, f"{strategy} block gc", 2)
    (gathering,) = (
        number for number, purpose in trace.streams.items() if purpose == "all-gather"
    )
    events = of_phase(trace, "backward")
    joins = [
        event
        for event in events
        if isinstance(event, Kernel) and event.stream == gathering
    ]
    if strategy == "fsdp2":
        assert not joins
        return
    assert [event.name for event in joins] == ["aten::cat"] * 3
    # On the gathering stream: a unit's parameters again, except the root's, which stayed, and its
    # joined gradient.
    sizes = sorted(
        event.bytes
        for event in events
        if isinstance(event, Alloc) and event.stream == gathering
    )
    assert sizes == sorted([2 * BLOCK] * 4 + [2 * REST])
    # Its single gradients, nine a block and three of the rest, are used there too, and the joined
    # one by the reduction.
    recorded = [event.stream for event in events if isinstance(event, RecordStream)]
    assert recorded.count(gathering) >= 2 * 9 + 3
