"""The simulated device supports the calls of PyTorch and this project, and fails where hardware would."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdptoys.device.free_memory import least_free_bytes
from scripts.ranks import run_ranks
from tests.simulated_npu.ranks import MODES, SITE, run_on_npu

MIB = 2**20


def operators(device: str) -> list[Any]:
    torch.manual_seed(3)
    x = torch.randn(6, 8).to(device).requires_grad_()
    weight = torch.randn(5, 8).to(device).requires_grad_()
    tokens = torch.randint(6, (4, 3)).to(device)
    heads = torch.randn(3, 2, 4, 7, 16).to(device).requires_grad_()
    attended = F.scaled_dot_product_attention(*heads, is_causal=True)
    normed = F.rms_norm(F.silu(x), (8,)) + F.layer_norm(x, (8,))
    logits = F.linear(normed, weight)
    loss = F.cross_entropy(logits, tokens.flatten()[:6] % 5) + attended.square().mean()
    loss = loss + F.embedding(tokens, x).sum() + x.to(torch.bfloat16).float().cumsum(0).sum()
    loss.backward()
    picked = x[tokens[:, 0]], torch.topk(x, 3).values, x.t().contiguous(), torch.cat([x, x]), x.argmax(1)
    return [tensor.detach().cpu().tolist() for tensor in (loss, x.grad, weight.grad, heads.grad, *picked)]


@pytest.mark.parametrize("mode", MODES)
def test_operators_and_gradients_equal_the_cpu_bitwise(mode: str) -> None:
    """Oracle: the same on the CPU."""
    assert run_on_npu(operators, "npu", mode=mode) == run_ranks(1, operators, "cpu")[0]


def random_numbers(device: str) -> list[Any]:
    torch.manual_seed(11)
    drawn = [torch.rand(5, device=device), torch.randn(5, device=device)]
    generator = torch.Generator(device=device).manual_seed(4)
    drawn.append(torch.randperm(9, device=device, generator=generator))
    state = torch.get_device_module(device).get_rng_state() if device == "npu" else torch.get_rng_state()
    first = torch.rand(3, device=device)
    (torch.get_device_module(device) if device == "npu" else torch).set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=device))
    return [tensor.cpu().tolist() for tensor in drawn]


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_and_generator_states_equal_the_cpu(mode: str) -> None:
    """Oracle: the CPU's generator."""
    assert run_on_npu(random_numbers, "npu", mode=mode) == run_ranks(1, random_numbers, "cpu")[0]


def mistakes() -> list[str]:
    x = torch.ones(4, device="npu")
    messages = []
    for wrong in (
        lambda: x + torch.ones(4),
        lambda: torch.zeros(2, device="npu:1"),
        lambda: torch.distributed.all_reduce(torch.ones(2)),
        lambda: torch.distributed.all_reduce(torch.ones(2, dtype=torch.float64, device="npu")),
        lambda: x.numpy(),
    ):
        try:
            wrong()
        except (RuntimeError, TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_invalid_operations_fail_as_on_hardware() -> None:
    """Oracle: error messages of PyTorch, CUDA and HCCL."""
    devices, ordinal, backend, double, numpy = run_on_npu(mistakes)
    assert "Expected all tensors to be on the same device" in devices
    assert "invalid device ordinal" in ordinal
    assert "No backend type associated with device type cpu" in backend
    assert "cannot reduce Double" in double
    assert "can't convert npu:0 device type tensor to numpy" in numpy


def memory_use() -> dict[str, Any]:
    accelerator = torch.accelerator
    before = accelerator.memory_allocated()
    kept = torch.empty(MIB, dtype=torch.uint8, device="npu")
    freed = torch.empty(3 * MIB + 1, dtype=torch.uint8, device="npu")
    during = accelerator.memory_allocated() - before
    del freed
    after = accelerator.memory_allocated() - before
    again = torch.empty(3 * MIB, dtype=torch.uint8, device="npu")
    reserved = accelerator.memory_reserved()
    del again, kept
    accelerator.empty_cache()
    return {
        "during": during,
        "after": after,
        "peak": accelerator.max_memory_allocated() - before,
        "reserved": reserved,
        "reserved at the end": accelerator.memory_reserved(),
        "free": accelerator.get_memory_info()[0],
    }


def test_allocator_rounds_to_512_bytes_and_reuses_freed_blocks() -> None:
    """Oracle: arithmetic; blocks are multiples of 512 bytes, and freed ones are reused."""
    use = run_on_npu(memory_use, capacity_mib=16)
    assert use["during"] == use["peak"] == 4 * MIB + 512
    assert use["after"] == MIB
    assert use["reserved"] == 4 * MIB + 512
    assert use["reserved at the end"] == 0 and use["free"] == 16 * MIB


def run_out() -> tuple[str, int, int]:
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="npu")
    freed = torch.empty(2 * MIB, dtype=torch.uint8, device="npu")
    del freed
    fits = torch.empty(3 * MIB, dtype=torch.uint8, device="npu")  # frees the cache first
    try:
        torch.empty(MIB, dtype=torch.uint8, device="npu")
    except torch.OutOfMemoryError as error:
        return str(error), torch.accelerator.memory_stats()["num_ooms"], len(kept) + len(fits)
    raise AssertionError("8 MiB hold no 9")


@pytest.mark.parametrize("mode", MODES)
def test_out_of_memory_message_has_the_form_of_torch_npu(mode: str) -> None:
    """Oracle: torch_npu's message, which ``profiler/out_of_memory.py`` parses, and arithmetic."""
    message, failures, _ = run_on_npu(run_out, mode=mode, capacity_mib=8)
    assert message.startswith(
        "NPU out of memory. Tried to allocate 0.00 GiB (NPU 0; 0.01 GiB total capacity; 0.01 GiB already allocated; "
    )
    assert failures == 1


def two_streams(waits: bool) -> list[float]:
    x = torch.ones(1000, device="npu")
    side = torch.Stream(device="npu")
    doubled = x * 2
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        added = doubled + 1
    side.synchronize()
    numbers: list[float] = added.cpu().tolist()
    return numbers


def test_missing_stream_wait_reads_stale_data() -> None:
    """Oracle: the value 3; hardware only exposes the mistake sometimes."""
    expected = [3.0] * 1000
    for mode in MODES:
        assert run_on_npu(two_streams, True, mode=mode) == expected
    assert run_on_npu(two_streams, False) == expected
    assert run_on_npu(two_streams, False, mode="delayed") != expected


def freed_on_one_stream(recorded: bool) -> list[float]:
    x = torch.ones(1000, device="npu")
    side = torch.Stream(device="npu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        added = x + 1
    if recorded:
        x.record_stream(side)
    del x
    other = torch.zeros(1000, device="npu")  # in the same block, unless it is known to be in use
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    numbers: list[float] = (added.cpu() + other.cpu()).tolist()
    return numbers


def test_unrecorded_use_on_another_stream_corrupts_memory() -> None:
    """Oracle: the value 2, which a stream reads if its memory was not reused."""
    assert run_on_npu(freed_on_one_stream, True, mode="delayed") == [2.0] * 1000
    assert run_on_npu(freed_on_one_stream, False, mode="delayed") != [2.0] * 1000


def pinned_copies() -> dict[str, bool]:
    source = torch.ones(1000).pin_memory()
    x = source.to("npu", non_blocking=True)
    source.fill_(5)  # before the copy has run
    late = x.cpu()
    target = torch.zeros(1000).pin_memory()
    target.copy_(x + 1, non_blocking=True)
    early = target.clone()
    torch.accelerator.synchronize()
    plain = torch.ones(1000)
    y = plain.to("npu", non_blocking=True)
    plain.fill_(5)
    return {
        "pinned": source.is_pinned() and not plain.is_pinned(),
        "source was changed": bool((late == 5).all()),
        "target was early": bool((early == 0).all()),
        "target in the end": bool((target == late + 1).all()),
        "plain memory was staged": bool((y.cpu() == 1).all()),
    }


def test_only_pinned_copies_are_asynchronous() -> None:
    """Oracle: CUDA's rules for ``non_blocking``."""
    seen = run_on_npu(pinned_copies, mode="delayed")
    assert all(seen.values()), seen
    seen = run_on_npu(pinned_copies)
    assert not seen["source was changed"] and not seen["target was early"] and seen["target in the end"]


def event_order() -> list[Any]:
    start, end = (torch.Event(device="npu", enable_timing=True) for _ in range(2))
    start.record()
    x = torch.ones(200, 200, device="npu")
    y = x @ x
    end.record()
    polls = 0
    while not end.query():
        polls += 1
    return [polls, start.elapsed_time(end) >= 0, bool((y == 200).all())]


def test_events_complete_after_earlier_work_and_polling_advances() -> None:
    """Oracle: immediate events are complete; a delayed one needs one query for each operation before it."""
    assert run_on_npu(event_order) == [0, True, True]
    polls, ordered, right = run_on_npu(event_order, mode="delayed")
    assert polls > 0 and ordered and right


def history() -> dict[str, Any]:
    memory = torch.npu.memory
    memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=100)
    kept = torch.empty(1000, device="npu")
    del kept
    live = torch.empty(5000, device="npu")
    snapshot: dict[str, Any] = memory._snapshot()
    memory._record_memory_history(enabled=None)
    torch.cuda._memory_viz.trace_plot(snapshot)
    assert live.numel() == 5000
    return snapshot


def test_memory_history_has_the_format_of_pytorch_with_stacks() -> None:
    """Oracle: PyTorch's own renderer accepts it; the entries of an allocation and a free."""
    snapshot = run_on_npu(history)
    entries = [entry for entry in snapshot["device_traces"][0] if not entry["action"].startswith("segment")]
    assert [entry["action"] for entry in entries] == ["alloc", "free_requested", "free_completed", "alloc"]
    assert entries[0]["size"] == 4096 and entries[0]["frames"][0]["name"] == "history"
    live = [
        block for segment in snapshot["segments"] for block in segment["blocks"] if block["requested_size"] == 20000
    ]
    assert [block["state"] for block in live] == ["active_allocated"]


def autocast() -> list[torch.dtype]:
    x = torch.ones(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        return [(x @ x).dtype, F.softmax(x @ x, -1).dtype, (x + 1).dtype]


def test_autocast_runs_matmul_in_bfloat16_and_softmax_in_float32() -> None:
    """Oracle: PyTorch's lists for accelerators."""
    assert run_on_npu(autocast) == [torch.bfloat16, torch.float32, torch.float32]


def undelayed() -> dict[str, int]:
    from simulated_npu import extension

    extension.count_operators(True)
    operators("npu")
    return dict(extension.undelayed_counts())


def test_delayed_mode_delays_all_operators_of_a_training_step() -> None:
    """Oracle: only operators that return a number to the host, or choose a kernel, run immediately."""
    assert set(run_on_npu(undelayed, mode="delayed")) <= {"aten::_local_scalar_dense", "aten::_fused_sdp_choice"}


def test_free_memory_is_that_of_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the devices' size, as a process of its own with the simulated devices sees it."""
    monkeypatch.setenv("PYTHONPATH", f"{SITE.parents[2]}{os.pathsep}{SITE}")
    monkeypatch.setenv("SIMULATED_NPU_DEVICES", "2")
    monkeypatch.setenv("SIMULATED_NPU_MIB", "64")
    assert least_free_bytes("npu", 2) == 64 * MIB
