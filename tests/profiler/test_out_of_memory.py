"""Out of memory: converted errors, the numbers of the report, and the advised switches."""

import contextlib
import dataclasses
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdptoys.device import Device, MemoryStats
from fsdptoys.loss import cross_entropy_sum
from fsdptoys.profiler import (
    ExplainedOutOfMemoryError,
    Failure,
    LiveBytes,
    OOMContext,
    PlacedBytes,
    Switches,
    explain_out_of_memory,
    is_out_of_memory,
    live_bytes,
    out_of_memory_report,
)
from fsdptoys.profiler.oom_advice import device_savings
from fsdptoys.profiler.oom_report import read_failure
from tests.harness.ranks import run_ranks

GIB = 2**30
MIB = 2**20

DDP = Switches(
    shards_parameters=False, takes_cpu_offload=False, world_size=4, fsdp_size=1, batch_size=4,
    seq_len=1024, grad_accum=2, dim=512, n_layers=8, vocab_size=32_000, param_dtype="float32",
)  # fmt: skip
FSDP = dataclasses.replace(
    DDP,
    shards_parameters=True,
    takes_cpu_offload=True,
    fsdp_size=4,
    param_dtype="bfloat16",
)
LIVE = LiveBytes(PlacedBytes(2 * GIB), PlacedBytes(GIB), PlacedBytes(4 * GIB))
REST = 10 * GIB

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 24.00 GiB of "
    "which 1.25 GiB is free. Including non-PyTorch memory, this process has 22.75 GiB memory in "
    "use. Of the allocated memory 20.00 GiB is allocated by PyTorch, with 16.00 MiB allocated in "
    "private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
NPU_MESSAGE = (
    "NPU out of memory. Tried to allocate 2.50 GiB (NPU 1; 24.00 GiB total capacity; 20.00 GiB "
    "already allocated; 20.00 GiB current active; 1.25 GiB free; 20.50 GiB reserved in total by "
    "PyTorch) If reserved memory is >>"
)


def accelerator(device_type: str = "cuda") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        type=device_type,
        is_accelerator=True,
        total_memory_bytes=24 * GIB,
        memory=lambda: MemoryStats(GIB, 22 * GIB, 21 * GIB),
    )


def oom_context(
    switches: Switches = DDP, phase: str = "backward", live: LiveBytes = LIVE
) -> OOMContext:
    return OOMContext(step=3, phase=phase, rank=2, live=live, switches=switches)


def advised(
    switches: Switches,
    phase: str = "backward",
    live: LiveBytes = LIVE,
    rest: int = REST,
) -> dict[str, int]:
    savings = device_savings(live, rest, phase, switches)
    assert [saving.saved_bytes for saving in savings] == sorted(
        (s.saved_bytes for s in savings), reverse=True
    )
    return {saving.switch: saving.saved_bytes for saving in savings}


CHECKPOINTING = "memory.gradient_checkpointing=full"
CHUNK = "memory.chunk_loss=true"
HALF_BATCH = "train.batch_size=2 train.grad_accum=4"
CPU_OFFLOAD = "memory.cpu_offload=true"
OPTIMIZER_OFFLOAD = "memory.optimizer_offload=true"
BF16 = "parallel.param_dtype=bfloat16"


def test_savings_follow_from_the_sizes():
    """Oracle: computed by hand, for DDP on four ranks in float32."""
    inputs = 4 * 1024 * 512 * 8 * 4
    common = {
        CHUNK: 4 * 1024 * 32_000 * 12,
        HALF_BATCH: REST // 2,
        OPTIMIZER_OFFLOAD: 4 * GIB,
    }
    shards = {"parallel=fsdp2 mesh.fsdp_size=-1": 7 * GIB * 3 // 4}
    assert advised(DDP) == common | shards | {
        CHECKPOINTING: REST - inputs,
        BF16: REST // 2,
    }
    assert advised(FSDP) == common | {
        CHECKPOINTING: REST - inputs // 2,
        CPU_OFFLOAD: 7 * GIB,
    }


@pytest.mark.parametrize(
    ("change", "gone", "come"),
    [
        ({"chunk_loss": True}, {CHUNK}, {}),
        (
            {"gradient_checkpointing": "full"},
            {CHECKPOINTING},
            {"memory.activation_offload=true": 4 * 1024 * 512 * 8 * 2},
        ),
        (
            {"gradient_checkpointing": "selective", "activation_offload": True},
            {CHECKPOINTING},
            {},
        ),
        ({"cpu_offload": True}, {CPU_OFFLOAD, OPTIMIZER_OFFLOAD}, {}),
        (
            {"optimizer_offload": True},
            {CPU_OFFLOAD, OPTIMIZER_OFFLOAD},
            {f"{CPU_OFFLOAD} memory.optimizer_offload=false": 7 * GIB},
        ),
        ({"batch_size": 1}, {HALF_BATCH}, {}),
        (
            {"batch_size": 9, "grad_accum": 2},
            {HALF_BATCH},
            {"train.batch_size=3 train.grad_accum=6": round(REST * 2 / 3)},
        ),
        ({"fsdp_size": 2}, set(), {"mesh.fsdp_size=-1": 7 * GIB // 2}),
        ({"param_dtype": "float32"}, set(), {BF16: REST // 2}),
    ],
)
def test_enabled_switches_are_not_advised_and_may_be_replaced(change, gone, come):
    """Oracle: the advice before the change, for FSDP2 over all ranks."""
    before = advised(FSDP)
    after = advised(dataclasses.replace(FSDP, **change))
    assert gone <= set(before) and not gone & set(after)
    assert {switch: after.get(switch) for switch in come} == come
    assert set(after) - set(before) <= set(come)


def test_whole_gradients_of_sharded_parameters_are_named() -> None:
    """Oracle: by hand: gradients of 3 more shards of 2 GiB, and never more than the rest that is
    held."""
    key = "parallel.reduce_each_microbatch=true"
    whole = dataclasses.replace(FSDP, sums_whole_gradients=True)
    assert advised(whole)[key] == advised(whole, "forward")[key] == 6 * GIB
    assert advised(whole, rest=GIB)[key] == GIB
    assert key not in advised(whole, "optimizer") | advised(FSDP)


def test_optimizer_step_advice_excludes_activation_switches():
    """Oracle: no activations are live in the optimizer step."""
    assert set(advised(FSDP, phase="optimizer")) == {CPU_OFFLOAD, OPTIMIZER_OFFLOAD}


def test_states_not_yet_allocated_count_only_in_the_optimizer_step():
    """Oracle: 6 GiB in total, none of it allocated; offloading them frees no memory in the forward
    before."""
    live = dataclasses.replace(LIVE, states=PlacedBytes())
    switches = dataclasses.replace(FSDP, states_bytes=6 * GIB)
    assert (
        advised(switches, "optimizer", live)["memory.optimizer_offload=true"] == 6 * GIB
    )
    assert "memory.optimizer_offload=true" not in advised(switches, "forward", live)
    failure = Failure(False, None, None, 13 * GIB, None)
    sentence = "the first optimizer step will add 6.00 GiB of states"
    assert sentence in out_of_memory_report(
        failure, oom_context(switches, "forward", live), "cuda"
    )
    assert sentence not in out_of_memory_report(
        failure, oom_context(switches, "optimizer", live), "cuda"
    )
    assert sentence not in out_of_memory_report(
        failure, oom_context(FSDP, "forward"), "cuda"
    )


@pytest.mark.parametrize(
    ("device_type", "message"), [("cuda", CUDA_MESSAGE), ("npu", NPU_MESSAGE)]
)
def test_report_has_the_failures_numbers_and_each_category(device_type, message):
    """Oracle: the allocator's message; the device's own statistics, read later, are others."""
    device = accelerator(device_type)
    with (
        pytest.raises(ExplainedOutOfMemoryError) as caught,
        explain_out_of_memory(device, oom_context),
    ):
        raise torch.OutOfMemoryError(message)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert lines[:9] == [
        f"the memory of the {device_type} device ran out on rank 2 in the backward of step 3",
        "2.50 GiB asked for, 24.00 GiB in all, 20.00 GiB allocated, 20.50 GiB reserved",
        "live in the device memory of this rank:",
        "2.00 GiB parameters",
        "1.00 GiB gradients",
        "4.00 GiB optimizer states",
        "13.00 GiB the rest: activations, temporaries, gathered parameters",
        "maximum saving of each switch alone:",
        (
            "12.94 GiB memory.gradient_checkpointing=full the rest without the block inputs, which "
            "it keeps"
        ),
    ]
    assert max(map(len, str(caught.value).splitlines())) <= 120


def test_error_without_numbers_uses_device_statistics():
    """Oracle: the device's statistics."""
    failure = read_failure(RuntimeError("CUDA error: out of memory"), accelerator())
    assert failure == Failure(False, None, 24 * GIB, GIB, 21 * GIB)


@pytest.mark.parametrize(("on_host", "advised"), [(False, False), (True, True)])
def test_exhausted_host_memory_advises_disabling_offload(on_host, advised):
    """Oracle: the states in host memory, which would fill the device."""
    live = LiveBytes(PlacedBytes(GIB), PlacedBytes(GIB), PlacedBytes(0, 4 * GIB))
    switches = dataclasses.replace(FSDP, optimizer_offload=True)
    failure = Failure(on_host, None, None, 6 * GIB, None)
    report = out_of_memory_report(failure, oom_context(switches, live=live), "cuda")
    advice = [
        line.split()[:3] for line in report.split("switch alone:\n")[1].splitlines()
    ]
    assert (advice == [["4.00", "GiB", "memory.optimizer_offload=false"]]) is advised
    assert OPTIMIZER_OFFLOAD not in report


def test_report_without_advice_is_explicit():
    """Oracle: one process with CPU offload, in the optimizer step."""
    switches = dataclasses.replace(FSDP, cpu_offload=True)
    report = out_of_memory_report(
        Failure(False, None, None, GIB, None),
        oom_context(switches, "optimizer"),
        "cuda",
    )
    assert report.splitlines()[-1].startswith("no other switch saves memory")


@pytest.mark.parametrize(
    ("allocate", "phase"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), "backward"),
        (lambda: np.empty(2**50, dtype=np.uint8), "data"),
    ],
    ids=["torch", "numpy"],
)
def test_failed_allocation_on_the_cpu_is_explained(allocate, phase):
    """Oracle: a failed request of 1 PiB; no switch may move tensors to host memory."""
    live = LiveBytes(PlacedBytes(0, MIB), PlacedBytes(0, MIB), PlacedBytes(0, 2 * MIB))
    with (
        pytest.raises(ExplainedOutOfMemoryError) as caught,
        explain_out_of_memory(Device("cpu"), lambda: oom_context(FSDP, phase, live)),
    ):
        allocate()
    report = str(caught.value)
    assert report.startswith(
        f"host memory ran out on rank 2 in the {phase} of step 3\n1024.00 TiB asked for"
    )
    assert "offload" not in report and (CHUNK in report) == (phase == "backward")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("size mismatch"), ValueError("out of memory"), KeyboardInterrupt()],
)
def test_other_errors_propagate_unchanged(error):
    """Oracle: the same object."""
    with (
        pytest.raises(type(error)) as caught,
        explain_out_of_memory(Device("cpu"), oom_context),
    ):
        raise error
    assert caught.value is error and not is_out_of_memory(error)


def test_explained_error_is_not_explained_again():
    """Oracle: the message of the inner one."""
    device = Device("cpu")
    with (
        pytest.raises(ExplainedOutOfMemoryError, match="forward of step 3") as caught,
        explain_out_of_memory(device, lambda: oom_context(phase="outer")),
        explain_out_of_memory(device, lambda: oom_context(phase="forward")),
    ):
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("explained", [True, False])
def test_allocation_that_failed_behind_another_error_is_explained(explained):
    """Oracle: the report of the allocation itself; pipelines, compilers and threads raise errors of
    their own."""
    with (
        pytest.raises(
            ExplainedOutOfMemoryError,
            match=r"on rank 2 in the forward of step 3\n1024.00 TiB",
        ) as caught,
        explain_out_of_memory(
            Device("cpu"),
            lambda: oom_context(phase="outer" if explained else "forward"),
        ),
    ):
        try:
            inner = explain_out_of_memory(
                Device("cpu"), lambda: oom_context(phase="forward")
            )
            with inner if explained else contextlib.nullcontext():
                torch.empty(2**50, dtype=torch.uint8)
        except RuntimeError as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error
    assert is_out_of_memory(caught.value)


def test_shared_storages_are_counted_once_in_full():
    """Oracle: the tensors' sizes; two parameters are views of one storage, and a third has no
    gradient."""
    flat = torch.zeros(100)
    first, second = (torch.nn.Parameter(part) for part in (flat[:60], flat[60:]))
    frozen = torch.nn.Parameter(torch.zeros(10))
    planned = torch.nn.Parameter(torch.zeros(10, device="meta"))
    optimizer = torch.optim.AdamW([first, second])
    for param in (first, second):
        param.grad = torch.ones_like(param)
    before = live_bytes([first, second, frozen, planned], optimizer)
    assert before == LiveBytes(
        PlacedBytes(0, 440), PlacedBytes(0, 400), PlacedBytes(0, 0)
    )
    optimizer.step()
    after = live_bytes([first, second, frozen, planned], optimizer)
    # two moments and the number of the step
    assert after.states.host_bytes == 2 * 400 + 2 * 4
    assert after.on_host().device_bytes == 440 + 400 + 808
    assert live_bytes([first], None).states == PlacedBytes()


def _count_sharded() -> LiveBytes:
    model = torch.nn.Linear(64, 32, bias=False)
    fully_shard(
        model,
        mesh=torch.distributed.device_mesh.init_device_mesh(
            "cpu", (dist.get_world_size(),)
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return live_bytes(model.parameters(), optimizer)


def test_sharded_parameters_count_as_their_local_shard():
    """Oracle: half of 64 x 32 float32 elements on each of two real ranks; states include the step
    count."""
    shard = 64 * 32 * 4 // 2
    counted = run_ranks(2, _count_sharded)
    assert [live.parameters.host_bytes for live in counted] == [shard] * 2
    assert [live.gradients.host_bytes for live in counted] == [shard] * 2
    assert all(2 * shard < live.states.host_bytes <= 2 * shard + 64 for live in counted)


def test_loss_peak_memory_matches_the_advice():
    """Oracle: the loss's own peak by the profiler's allocations: 12 bytes per logit in both
    dtypes."""
    tokens = 256
    dim = 16
    vocab = 4000
    for dtype in (torch.float32, torch.bfloat16):
        hidden_ND = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
        weight_VD = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
        labels_N = torch.randint(0, vocab, (tokens,))
        with torch.profiler.profile(profile_memory=True) as profiler:
            cross_entropy_sum(hidden_ND, weight_VD, labels_N).backward()
        sizes = [
            (event.start_ns(), event.nbytes())
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        live = peak = 0
        for _, size in sorted(sizes):
            live += size
            peak = max(peak, live)
        assert peak == pytest.approx(12 * tokens * vocab, rel=0.02)
