"""The count of tensors' bytes on a CPU."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptoys.device import AllocationCount, CountedBytes, Device, in_host_place
from fsdptoys.device.allocations import _live_storages
from scripts.ranks import run_ranks

KIB = 2**10


def kib(count: int) -> Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_peak_and_split_are_those_counted_by_hand() -> None:
    """Oracle: 8 + 4 before; +16, −16, +5 (a gradient), −4 (from before), +7, −7: the highest sum is 8 + 4 + 16."""
    parameters = [kib(8)]
    old = [kib(4)]
    count = AllocationCount({"parameters": parameters})
    kib(16)
    gradient = kib(5)
    count.label({"gradients": [gradient]})
    old.clear()
    kib(7)
    counted = count.finish({"states": [kib(1)]})
    rest = counted.before_bytes - 8 * KIB
    assert counted.peak_bytes - counted.before_bytes == 16 * KIB
    assert counted.at_peak == {"parameters": 8 * KIB, "rest": rest + 16 * KIB}
    assert counted.end_bytes - counted.before_bytes == (5 - 4 + 1) * KIB


def test_ends_of_earlier_blocks_lower_later_peaks() -> None:
    """Oracle: by hand: a block of 32 from before ends first, so that 20 more stay below the start."""
    blocks = [kib(32)]
    count = AllocationCount({})
    blocks.clear()
    later = kib(20)
    counted = count.finish({"gradients": [later]})
    assert counted.peak_bytes == counted.before_bytes
    assert counted.end_bytes == counted.before_bytes - 12 * KIB


def test_host_copies_are_counted_apart() -> None:
    """Oracle: by hand: 24 and 40 in the host's place, of which 40 by their purpose."""
    offloaded = in_host_place(kib(24))
    states, parameters = kib(40), kib(8)
    count = AllocationCount({"states": [states], "parameters": [parameters]}, host_purposes=["states"])
    counted = count.finish({})
    assert counted.host_bytes == offloaded.nbytes + states.nbytes
    assert counted.at_peak["parameters"] == parameters.nbytes and "states" not in counted.at_peak


def test_backward_and_views_are_counted_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: gradients of two matrices by hand, both views of one buffer; no warning is printed."""
    buffer = torch.zeros(2, 64, 64)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    for weight, view in zip(weights, buffer, strict=True):
        weight.grad = view
    count = AllocationCount({"parameters": weights})
    (weights[0] @ weights[1]).relu().sum().backward()
    count.label({"gradients": [weight.grad for weight in weights if weight.grad is not None]})
    counted = count.finish({})
    assert counted.at_peak["gradients"] == buffer.nbytes
    assert counted.at_peak["parameters"] == 2 * 64 * 64 * 4
    assert counted.end_bytes == counted.before_bytes
    # The forward keeps the product and its relu; the backward has the scalar's gradient spread over 64 × 64.
    assert counted.peak_bytes - counted.before_bytes >= 3 * 64 * 64 * 4
    # Kineto reads its level once: if another test has used it before, its own lines remain.
    assert all(line.startswith("USDT:") for line in capfd.readouterr().err.splitlines())


def gathered() -> tuple[CountedBytes, int]:
    shards = [torch.ones(1000) for _ in range(2)]
    count = AllocationCount({})
    torch.distributed.all_gather(shards, torch.ones(1000))
    whole = torch.ones(3000)
    return count.finish({}), whole.nbytes


def test_buffers_of_collectives_are_seen() -> None:
    """Oracle: the tensors of the test; gloo's copies come on top of the contribution."""
    for counted, whole in run_ranks(2, gathered):
        assert counted.end_bytes - counted.before_bytes >= whole
        assert counted.peak_bytes - counted.before_bytes >= max(whole, 3 * 4000)


def test_found_storages_are_those_that_pytorch_allocated() -> None:
    """Oracle: tensors on NumPy's memory, without memory, and a second view."""
    mine = kib(3)
    foreign, empty = torch.from_numpy(np.zeros(9)), torch.empty(0)
    found = _live_storages()
    assert found[mine.data_ptr()].nbytes() == 3 * KIB
    assert foreign.data_ptr() not in found and empty.data_ptr() not in found


def test_a_cpu_has_memory_once_counted() -> None:
    """Oracle: the counted numbers; the higher of two peaks stays until the reset."""
    device = Device("cpu")
    assert device.memory() is None
    device.record(CountedBytes(0, 5, 90, {"rest": 90}, 0))
    device.record(CountedBytes(0, 7, 30, {"rest": 30}, 2))
    memory = device.memory()
    assert memory is not None and memory[:3] == (7, 90, None)
    assert (memory.at_peak, memory.host_bytes) == ({"rest": 90}, 2)
    device.reset_peak_memory()
    assert device.memory() is None


def test_fake_copies_of_a_planned_run_are_left_out() -> None:
    """Oracle: no warning about their missing addresses."""
    with FakeTensorMode():
        planned = in_host_place(torch.zeros(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AllocationCount({}).finish({}).host_bytes == 0
    assert planned.numel() == 10
