"""Bytes that a plan counts for operators whose schema does not show them."""

import pytest
import torch

from fsdptoys.device.profile import AttentionKind
from fsdptoys.plan.simulator.events import Kernel
from fsdptoys.plan.trace.op_recorder import OpRecorder


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 4), (torch.float64, 4 + 8 + 8)])
def test_norm_in_float64_reads_a_copy_of_the_gradient(dtype: torch.dtype, each: int) -> None:
    """Oracle: ``native/ReduceOpsUtils.h``: the input in float32, and its copy in float64, written and read."""
    gradient = torch.empty(1000, device="meta")
    recorder = OpRecorder("meta", AttentionKind.flash)
    with recorder.watch():
        torch.linalg.vector_norm(gradient, dtype=dtype)
    (norm,) = [event for event in recorder.trace.events if isinstance(event, Kernel)]
    assert norm.bytes == 1000 * each + dtype.itemsize


def test_joining_a_tensor_several_times_reads_it_as_often() -> None:
    """Oracle: as many bytes are read as written."""
    part = torch.empty(1000, device="meta")
    recorder = OpRecorder("meta", AttentionKind.flash)
    with recorder.watch():
        torch.cat([part] * 20)
    (joined,) = [event for event in recorder.trace.events if isinstance(event, Kernel)]
    assert joined.bytes == 2 * 20 * 1000 * 4
