"""Hardware of a machine, and its environment variables."""

import ast
import errno
import os
import subprocess
import sys

import pytest
import torch

from fsdptoys.config.launch_config import DeviceChoice
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import (
    find_hardware,
    hardware_environment,
    is_out_of_files,
)
from fsdptoys.train.distributed import deterministic_kernels

# torch 2.9.1 ignores the newer name (https://github.com/pytorch/pytorch/issues/183387).
ALLOC_CONF = (
    "PYTORCH_ALLOC_CONF" if torch.__version__ >= "2.10" else "PYTORCH_CUDA_ALLOC_CONF"
)
RECORDER = {
    "TORCH_FR_BUFFER_SIZE"
    if torch.__version__ >= "2.10"
    else "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
HCCL = {
    "HCCL_CONNECT_TIMEOUT": "600",
    "HCCL_EXEC_TIMEOUT": "660",
    "TORCH_HCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_HCCL_ENABLE_MONITORING": "1",
}


THREADS = {"OMP_NUM_THREADS": "4"}
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    "device_type, present, expected",
    [
        ("cpu", {}, THREADS),
        ("cpu", {"OMP_NUM_THREADS": "1"}, {}),
        ("cuda", {}, THREADS | {ALLOC_CONF: EXPANDABLE} | RECORDER),
        ("npu", {}, THREADS | {"PYTORCH_NPU_ALLOC_CONF": EXPANDABLE} | HCCL),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "x"}, THREADS | RECORDER),
        ("npu", {"PYTORCH_ALLOC_CONF": "x"}, THREADS | HCCL),
        ("cuda", {ALLOC_CONF: "x"} | RECORDER, THREADS),
        ("npu", {"PYTORCH_NPU_ALLOC_CONF": "x"} | HCCL, THREADS),
    ],
)
def test_user_environment_takes_precedence(
    device_type: str, present: dict[str, str], expected: dict[str, str]
) -> None:
    """Oracle: the table; 8 cores and 2 ranks, and a collective may take 600 s. A rank has at least
    one thread."""
    assert hardware_environment(device_type, 2, 8, False, present) == expected
    assert hardware_environment(device_type, 16, 2, False, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "device_type, name, value",
    [
        ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("npu", "HCCL_DETERMINISTIC", "true"),
    ],
)
def test_library_determinism_variables_are_set_only_in_deterministic_runs(
    device_type: str,
    name: str,
    value: str,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: cuBLAS's documentation on reproducibility, CANN's of HCCL_DETERMINISTIC; a process of
    no launcher too."""
    expected = value if deterministic else None
    assert (
        hardware_environment(device_type, 1, 1, deterministic, {}).get(name) == expected
    )
    monkeypatch.setattr(os, "environ", {})
    with deterministic_kernels(deterministic, device_type):
        assert os.environ.get(name) == expected


@pytest.mark.parametrize(
    "timeout_seconds, connect, execute",
    [(30, 120, 180), (3600.5, 3600, 3660), (90000, 7200, 90060)],
)
def test_hccl_timeouts_exceed_the_run_timeout(
    timeout_seconds: float, connect: int, execute: int
) -> None:
    """Oracle: by hand, from CANN's range of 120 to 7200 s for meeting, and its advice to set that
    below the other."""
    environment = hardware_environment("npu", 8, 8, False, {}, timeout_seconds)
    assert (environment["HCCL_CONNECT_TIMEOUT"], environment["HCCL_EXEC_TIMEOUT"]) == (
        str(connect),
        str(execute),
    )
    assert float(environment["HCCL_EXEC_TIMEOUT"]) > timeout_seconds


@pytest.mark.parametrize(
    "visible, fix",
    [("1,0", "0,1"), ("0, 1", "0,1"), ("npu:0", "0"), ("0,1", None), ("", None)],
)
def test_ambiguous_visible_npus_are_refused(
    visible: str, fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the table, from CANN's description of the variable; None stands for a valid value."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    if fix is None:
        assert find_hardware(DeviceChoice.auto).devices >= 0
        return
    with pytest.raises(ConfigError, match=rf"set ASCEND_RT_VISIBLE_DEVICES={fix}$"):
        find_hardware(DeviceChoice.auto)
    assert find_hardware(DeviceChoice.cpu).device_type == "cpu"


def test_conflicting_allocator_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: torch_npu 2.13.0 ends with "Both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF have
    been set"."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(
        ConfigError, match=r"torch_npu takes one alone; unset PYTORCH_ALLOC_CONF$"
    ):
        find_hardware(DeviceChoice.npu)
    assert find_hardware(DeviceChoice.cpu).device_type == "cpu"


NAME_QUERY = """
import os, torch

def get_device_name(index):
    names = [name for name in os.environ if name.endswith("ALLOC_CONF")]
    print({name: os.environ[name] for name in names}, flush=True)
    os._exit(3)

torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
torch.cuda.get_device_name = get_device_name
from fsdptoys.cli.main import main
main(["train", "model=llama_debug"])
"""


@pytest.mark.usefixtures("unmeasured")
def test_torchrun_rank_sets_the_allocator_before_it_queries_the_device() -> None:
    """Oracle: the environment at the first query of a device's name, which creates CUDA's
    allocator."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-c", NAME_QUERY]
    process = subprocess.run(
        command, env=os.environ | rank, capture_output=True, text=True
    )
    assert process.returncode == 3, process.stderr
    assert ast.literal_eval(process.stdout) == {ALLOC_CONF: "expandable_segments:True"}


@pytest.mark.parametrize(
    "cause",
    [OSError(errno.EMFILE, "x"), RuntimeError("failed to init uv loop")],
    ids=str,
)
def test_spent_open_files_are_found_among_causes(cause: Exception) -> None:
    """Oracle: the system's error number, and the text of PyTorch's store."""
    error = RuntimeError("no rendezvous")
    assert not is_out_of_files(error)
    error.__cause__ = cause
    assert is_out_of_files(error)
