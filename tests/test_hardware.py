"""What a machine has, and the environment that it wants."""

import os

import pytest
import torch

from fsdptoys.config import DeviceChoice
from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.hardware import find_hardware, hardware_environment

RECORDER = {
    "TORCH_FR_BUFFER_SIZE" if torch.__version__ >= "2.10" else "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@pytest.mark.parametrize(
    "device_type, present, expected",
    [
        ("cpu", {}, {"OMP_NUM_THREADS": "4"}),
        ("cpu", {"OMP_NUM_THREADS": "1"}, {}),
        ("cuda", {"OMP_NUM_THREADS": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | RECORDER),
        ("npu", {"OMP_NUM_THREADS": "1"}, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"} | RECORDER),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "x"} | RECORDER, {"OMP_NUM_THREADS": "4"}),
        ("npu", {"PYTORCH_NPU_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
        ("cuda", {"PYTORCH_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"} | RECORDER),
        ("npu", {"PYTORCH_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_environment_of_the_user_wins(device_type: str, present: dict[str, str], expected: dict[str, str]) -> None:
    """Oracle: the table; 8 cores and 2 ranks."""
    assert hardware_environment(device_type, 2, 8, False, present) == expected


def test_more_ranks_than_cores_get_one_thread_each() -> None:
    """Oracle: at least 1."""
    assert hardware_environment("cpu", 16, 2, False, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("deterministic", [False, True])
def test_cublas_workspace_is_set_for_deterministic_runs_alone(deterministic: bool) -> None:
    """Oracle: cuBLAS's documentation on reproducibility."""
    environment = hardware_environment("cuda", 1, 1, deterministic, {})
    assert environment.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_a_device_that_is_not_there_is_a_mistake() -> None:
    """Oracle: no machine has both CUDA and NPU devices."""
    with pytest.raises(
        ConfigError, match=r"launch.device=npu finds no such device on this machine; set launch.device="
    ):
        find_hardware(DeviceChoice.npu)


def test_cores_are_at_most_those_of_the_affinity() -> None:
    """Oracle: the system's own count."""
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
