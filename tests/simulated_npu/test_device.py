"""The simulated device and its ``hccl`` support PyTorch's and this project's calls, and fail where
hardware would."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdptoys.device.free_memory import least_free_bytes
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks
from tests.simulated_npu.ranks import (
    BOTH_MODES,
    MODES,
    SITE,
    run_npu_ranks,
    run_on_npu,
    simulated_npu,
)

MIB = 2**20
RANKS = 2


def compute() -> None:
    """Call the kinds of operators of a training step."""
    x = torch.randn(6, 8).to("npu").requires_grad_()
    weight = torch.randn(5, 8).to("npu").requires_grad_()
    tokens = torch.randint(6, (4, 3)).to("npu")
    heads = torch.randn(3, 2, 4, 7, 16).to("npu").requires_grad_()
    attended = F.scaled_dot_product_attention(*heads, is_causal=True)
    normed = F.rms_norm(F.silu(x), (8,)) + F.layer_norm(x, (8,))
    loss = F.cross_entropy(F.linear(normed, weight), tokens.flatten()[:6] % 5)
    loss = (
        loss
        + F.embedding(tokens, x).sum()
        + x.to(torch.bfloat16).float().cumsum(0).sum()
    )
    (loss + attended.square().mean() + torch.topk(x, 3).values.sum()).backward()
    torch.cat([x, x[tokens[:, 0]]]).cpu()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda x: x + torch.ones(4), "Expected all tensors to be on the same device"),
        (lambda x: torch.zeros(2, device="npu:1"), "invalid device ordinal"),
        (
            lambda x: dist.all_reduce(torch.ones(2)),
            "No backend type associated with device type cpu",
        ),
        (lambda x: dist.all_reduce(x.double()), "cannot reduce Double"),
        (lambda x: x.numpy(), "can't convert npu:0 device type tensor to numpy"),
    ],
    ids=["two devices", "ordinal", "backend", "double", "numpy"],
)
def test_invalid_operations_fail_as_on_hardware(
    mistake: Callable[[torch.Tensor], object], message: str
) -> None:
    """Oracle: error messages of PyTorch, CUDA and HCCL."""
    with pytest.raises(RuntimeError, match=message):
        run_on_npu(lambda: mistake(torch.ones(4, device="npu")))


def two_streams(waits: bool) -> bool:
    """Whether a stream saw another one's result."""
    x = torch.ones(1000, device="npu")
    side = torch.Stream(device="npu")
    doubled = x * 2
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        added = doubled + 1
    side.synchronize()
    return bool((added.cpu() == 3).all())


def freed_on_one_stream(recorded: bool) -> bool:
    """Whether a stream read memory before its reuse."""
    x = torch.ones(1000, device="npu")
    side = torch.Stream(device="npu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        added = x + 1
    if recorded:
        x.record_stream(side)
    del x
    # in the same block, unless it is known to be in use
    other = torch.zeros(1000, device="npu")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    return bool((added.cpu() + other.cpu() == 2).all())


@pytest.mark.parametrize(
    ("function", "is_ordered", "mode", "right"),
    [
        *((two_streams, True, mode, True) for mode in MODES),
        (two_streams, False, "immediate", True),
        (two_streams, False, "delayed", False),
        (freed_on_one_stream, True, "delayed", True),
        (freed_on_one_stream, False, "delayed", False),
    ],
)
def test_missing_wait_or_record_of_a_stream_gives_wrong_numbers(
    function: Callable[[bool], bool], is_ordered: bool, mode: str, right: bool
) -> None:
    """Oracle: arithmetic; hardware only exposes the mistakes sometimes."""
    assert run_on_npu(function, is_ordered, mode=mode) is right


@pytest.mark.parametrize("delayed", [False, True])
def test_only_pinned_copies_are_asynchronous(delayed: bool) -> None:
    """Oracle: CUDA's rules for ``non_blocking``."""

    def copy() -> None:
        source = torch.ones(1000).pin_memory()
        plain = torch.ones(1000)
        assert source.is_pinned() and not plain.is_pinned()
        x = source.to("npu", non_blocking=True)
        source.fill_(5)  # before the copy has run
        late = x.cpu()
        assert (late == (5 if delayed else 1)).all()
        target = torch.zeros(1000).pin_memory()
        target.copy_(x + 1, non_blocking=True)
        assert (target == (0 if delayed else 2)).all()
        torch.accelerator.synchronize()
        assert (target == late + 1).all()
        y = plain.to("npu", non_blocking=True)
        plain.fill_(5)
        assert (y.cpu() == 1).all(), "plain memory was not staged"

    run_on_npu(copy, mode=MODES[delayed])


@pytest.mark.parametrize("delayed", [False, True])
def test_events_complete_after_earlier_work_and_polling_advances(delayed: bool) -> None:
    """Oracle: immediate events are complete; a delayed one needs one query for each operation
    before it."""

    def poll() -> tuple[bool, bool, bool]:
        start, end = (torch.Event(device="npu", enable_timing=True) for _ in range(2))
        start.record()
        x = torch.ones(200, 200, device="npu")
        y = x @ x
        end.record()
        polls = 0
        while not end.query():
            polls += 1
        return polls > 0, start.elapsed_time(end) >= 0, bool((y == 200).all())

    assert run_on_npu(poll, mode=MODES[delayed]) == (delayed, True, True)


def random_numbers(device: str) -> list[Any]:
    """Random numbers, and those from a restored state of the generator."""
    torch.manual_seed(11)
    drawn = [torch.rand(5, device=device), torch.randn(5, device=device)]
    generator = torch.Generator(device=device).manual_seed(4)
    drawn.append(torch.randperm(9, device=device, generator=generator))
    states = torch.get_device_module(device) if device == "npu" else torch
    state = states.get_rng_state()
    first = torch.rand(3, device=device)
    states.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=device))
    return [tensor.cpu().tolist() for tensor in drawn]


@BOTH_MODES
def test_random_numbers_equal_the_cpu_bitwise(mode: str) -> None:
    """Oracle: the same on the CPU."""
    assert (
        run_on_npu(random_numbers, "npu", mode=mode)
        == run_ranks(1, random_numbers, "cpu")[0]
    )


def test_autocast_runs_matmul_in_bfloat16_and_softmax_in_float32() -> None:
    """Oracle: PyTorch's lists for accelerators."""

    def autocast() -> list[torch.dtype]:
        x = torch.ones(4, 4, device="npu")
        with torch.autocast("npu", dtype=torch.bfloat16):
            return [(x @ x).dtype, F.softmax(x @ x, -1).dtype, (x + 1).dtype]

    assert run_on_npu(autocast) == [torch.bfloat16, torch.float32, torch.float32]


def test_delayed_mode_delays_all_operators_of_a_training_step() -> None:
    """Oracle: only operators that return a number to the host, or choose a kernel, run
    immediately."""

    def undelayed() -> set[str]:
        simulated_npu.extension.count_operators(True)
        compute()
        return set(simulated_npu.extension.undelayed_counts())

    assert run_on_npu(undelayed, mode="delayed") <= {
        "aten::_local_scalar_dense",
        "aten::_fused_sdp_choice",
    }


def test_free_memory_is_that_of_the_fullest_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the devices' size, as a process of its own with the simulated devices sees it."""
    monkeypatch.setenv("PYTHONPATH", f"{SITE.parents[2]}{os.pathsep}{SITE}")
    monkeypatch.setenv("SIMULATED_NPU_DEVICES", "2")
    monkeypatch.setenv("SIMULATED_NPU_MIB", "64")
    assert least_free_bytes("npu", 2) == 64 * MIB


def sum_is_right(waits: bool) -> bool:
    x = torch.ones(1000, device="npu")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    doubled = x * 2
    right = bool((doubled.cpu() == 2 * RANKS).all())
    work.wait()
    return right


@pytest.mark.parametrize("waits", [True, False])
def test_unwaited_collective_leaves_old_values_visible(waits: bool) -> None:
    """Oracle: the sum; only delayed mode exposes the mistake reliably."""
    assert run_npu_ranks(RANKS, sum_is_right, waits, mode="delayed") == [waits] * RANKS


def test_host_waiting_elsewhere_does_not_block_collectives(tmp_path: Path) -> None:
    """Oracle: the value 3; blocking would deadlock the ranks."""
    marker = tmp_path / "done"

    def reduce_while_one_host_waits() -> float:
        x = torch.ones(3, device="npu")
        dist.broadcast(x, src=0)
        if dist.get_rank() == 1:
            # needs rank 0's part, which its host does not wait for
            total = float(x.sum())
            marker.touch()
            return total
        wait_until(marker.exists, "the sum on rank 1")
        return float(x.sum())

    assert run_npu_ranks(RANKS, reduce_while_one_host_waits, mode="delayed") == [
        3.0,
        3.0,
    ]
