"""The process that traces for estimates: who may fork it, and its loss."""

import os
import signal
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.plan.estimate import estimate
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.trace import tracing_process
from tests.harness.plan_processes import in_fresh_process
from tests.harness.traced_runs import configured

extended = pytest.mark.extended

WORDS = ("model=llama2_7b", "model.n_layers=3", "parallel.param_dtype=bfloat16")
OUT_OF_HOST_MEMORY = (
    "the tracing process was killed, most likely for lack of host memory; free memory"
)


def test_autograd_and_torch_npu_prevent_forks_that_trace() -> None:
    """Oracle: a process that has computed nothing can fork. With torch_npu, which takes the fake
    device's place, it cannot; nor after a backward, as a fork lacks its threads."""
    assert in_fresh_process(_can_fork) == (True, False, False)


def _can_fork() -> tuple[bool, bool, bool]:
    before = tracing_process.can_fork()
    with mock.patch.dict(sys.modules, torch_npu=ModuleType("torch_npu")):
        with_npu = tracing_process.can_fork()
    torch.ones(1, requires_grad=True).sum().backward()
    return before, with_npu, tracing_process.can_fork()


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, ConfigError, OUT_OF_HOST_MEMORY),
        pytest.param(
            signal.SIGTERM,
            RuntimeError,
            "the tracing process ended with status -15:\n",
            marks=extended,
        ),
    ],
)
def test_lost_tracing_process_is_reported_and_replaced(
    number: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the full message; the next prediction has the numbers of the one before the loss."""
    # not traced by others
    overrides = (*WORDS, "train.seq_len=4096", f"optim.beta1=0.{number}")
    config = configured(overrides, 8, "cuda")
    hardware = load_hardware("h100")
    before = fast_estimate(config, hardware, 8)
    estimate.TRACED.clear()
    process = tracing_process.start_tracing("cuda")[0].process
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    with pytest.raises(error) as raised:
        fast_estimate(config, hardware, 8)
    assert str(raised.value) == message
    assert fast_estimate(config, hardware, 8) == before
